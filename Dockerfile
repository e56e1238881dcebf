# A server of models, for a CPU and for NVIDIA GPUs; docs/container.md says how to start it.
#   docker build --target cpu --tag sheepop:cpu .
#   docker build --target cuda --tag sheepop:cuda .
FROM python:3.12-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 XDG_CACHE_HOME=/cache SHEEPOP_MODELS=/cache/models
RUN useradd --uid 1000 --create-home sheepop \
    && install --directory --owner=sheepop /cache /models /work
COPY constraints.txt /constraints.txt
WORKDIR /work
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["sheepop"]
CMD ["serve", "model=/models/model", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS cuda
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --constraint /constraints.txt "$(ls /wheels/*.whl)[serve]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000

FROM base AS cpu
# PyTorch's builds for a CPU leave out several GB of CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --constraint /constraints.txt --index-url "${TORCH_INDEX}" --no-deps torch \
    && pip install --constraint /constraints.txt "$(ls /wheels/*.whl)[serve]"
USER 1000
