#include <ATen/Parallel.h>
#include <immintrin.h>
#include <cstdint>
#include <algorithm>
static inline float hsum(__m256 v){__m128 a=_mm_add_ps(_mm256_castps256_ps128(v),_mm256_extractf128_ps(v,1));a=_mm_add_ps(a,_mm_movehl_ps(a,a));a=_mm_add_ss(a,_mm_shuffle_ps(a,a,1));return _mm_cvtss_f32(a);}
struct F32{ using T=float; static inline __m256 load(const float*p){return _mm256_loadu_ps(p);} };
struct I8{ using T=int8_t; static inline __m256 load(const int8_t*p){return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));} };
// R weight rows times B inputs
template<class W,int R,int B> static inline void tile(const float*x,int64_t K,const typename W::T*w,float*y,int64_t N,const float*scale){
  __m256 acc[R][B]; for(int r=0;r<R;r++)for(int b=0;b<B;b++)acc[r][b]=_mm256_setzero_ps();
  for(int64_t k=0;k<K;k+=8){ __m256 a[R]; for(int r=0;r<R;r++)a[r]=W::load(w+r*K+k);
    for(int b=0;b<B;b++){__m256 v=_mm256_loadu_ps(x+b*K+k); for(int r=0;r<R;r++)acc[r][b]=_mm256_fmadd_ps(a[r],v,acc[r][b]);} }
  for(int r=0;r<R;r++)for(int b=0;b<B;b++)y[b*N+r]=hsum(acc[r][b])*(scale?scale[r]:1.f);
}
template<class W,int B> static void cols(const float*x,int64_t K,const typename W::T*w,float*y,int64_t N,const float*s,int64_t n0,int64_t n1){
  constexpr int R=B==1?4:(B==2?4:(B==3?3:2)); int64_t n=n0; for(;n+R<=n1;n+=R)tile<W,R,B>(x,K,w+n*K,y+n,N,s?s+n:nullptr); for(;n<n1;n++)tile<W,1,B>(x,K,w+n*K,y+n,N,s?s+n:nullptr);
}
template<class W> static void linear(const float*x,const typename W::T*w,const float*s,float*y,int64_t B,int64_t K,int64_t N){
  at::parallel_for(0,(N+31)/32,1+(N/32)/(4*at::get_num_threads()),[&](int64_t a,int64_t z){ for(int64_t t=a;t<z;t++){ int64_t n0=t*32,n1=std::min(N,n0+32);
    int64_t b=0; for(;b+4<=B;b+=4)cols<W,4>(x+b*K,K,w,y+b*N,N,s,n0,n1); 
    if(B-b==3)cols<W,3>(x+b*K,K,w,y+b*N,N,s,n0,n1); else if(B-b==2)cols<W,2>(x+b*K,K,w,y+b*N,N,s,n0,n1); else if(B-b==1)cols<W,1>(x+b*K,K,w,y+b*N,N,s,n0,n1);} });
}
extern "C" void lin32(const float*x,const float*w,float*y,int64_t B,int64_t K,int64_t N){linear<F32>(x,w,nullptr,y,B,K,N);}
extern "C" void lin8(const float*x,const int8_t*w,const float*s,float*y,int64_t B,int64_t K,int64_t N){linear<I8>(x,w,s,y,B,K,N);}
