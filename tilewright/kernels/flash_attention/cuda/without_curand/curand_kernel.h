// Stands before cuRAND's header: example 41 names a generator's state in signatures that none of our kernels calls.
#pragma once

struct curandStatePhilox4_32_10_t {};

__device__ float4 curand_uniform4(curandStatePhilox4_32_10_t*);
__device__ void skipahead(unsigned long long, curandStatePhilox4_32_10_t*);
