#include <ATen/Parallel.h>
#include <immintrin.h>
#include <cstdint>
#include <cmath>
#include <vector>
static inline float hsum(__m256 v){__m128 a=_mm_add_ps(_mm256_castps256_ps128(v),_mm256_extractf128_ps(v,1));a=_mm_add_ps(a,_mm_movehl_ps(a,a));a=_mm_add_ss(a,_mm_shuffle_ps(a,a,1));return _mm_cvtss_f32(a);}
static inline float dot(const float*a,const float*b,int64_t n){__m256 s=_mm256_setzero_ps();int64_t i=0;for(;i+8<=n;i+=8)s=_mm256_fmadd_ps(_mm256_loadu_ps(a+i),_mm256_loadu_ps(b+i),s);float r=hsum(s);for(;i<n;i++)r+=a[i]*b[i];return r;}
static inline void axpy(float w,const float*x,float*y,int64_t n){__m256 v=_mm256_set1_ps(w);int64_t i=0;for(;i+8<=n;i+=8)_mm256_storeu_ps(y+i,_mm256_fmadd_ps(v,_mm256_loadu_ps(x+i),_mm256_loadu_ps(y+i)));for(;i<n;i++)y[i]+=w*x[i];}
// q (R,H,C) keys (blocks,K,S,C) values (blocks,K,S,D) table (R,M) first,last (R): places from first to last inclusive; out (R,H,D)
extern "C" void attend(const float*q,const float*keys,const float*values,const int64_t*table,const int64_t*first,const int64_t*last,float*out,
  int64_t R,int64_t H,int64_t K,int64_t S,int64_t C,int64_t D,int64_t M,float scale,float cap,const float*slopes,const float*sinks){
  int64_t G=H/K;
  at::parallel_for(0,R*K,1,[&](int64_t a,int64_t z){ std::vector<float> w; for(int64_t t=a;t<z;t++){ int64_t r=t/K,k=t%K; int64_t n=last[r]-first[r]+1; w.resize(n*G);
    std::vector<float> top(G,-INFINITY);
    for(int64_t j=0;j<n;j++){ int64_t p=first[r]+j; const float*kp=keys+((table[r*M+p/S]*K+k)*S+p%S)*C;
      for(int64_t g=0;g<G;g++){ int64_t h=k*G+g; float s=dot(q+(r*H+h)*C,kp,C)*scale; if(cap>0)s=cap*std::tanh(s/cap); if(slopes)s-=slopes[h]*(last[r]-p); w[g*n+j]=s; if(s>top[g])top[g]=s; } }
    for(int64_t g=0;g<G;g++){ int64_t h=k*G+g; float m=top[g]; if(sinks&&sinks[h]>m)m=sinks[h]; float sum=sinks?std::exp(sinks[h]-m):0.f; float*wg=&w[g*n]; for(int64_t j=0;j<n;j++){wg[j]=std::exp(wg[j]-m);sum+=wg[j];}
      float inv=1.f/sum; for(int64_t j=0;j<n;j++)wg[j]*=inv; float*o=out+(r*H+h)*D; for(int64_t d=0;d<D;d++)o[d]=0.f; }
    for(int64_t j=0;j<n;j++){ int64_t p=first[r]+j; const float*vp=values+((table[r*M+p/S]*K+k)*S+p%S)*D; for(int64_t g=0;g<G;g++)axpy(w[g*n+j],vp,out+(r*H+k*G+g)*D,D); }
  }});
}
