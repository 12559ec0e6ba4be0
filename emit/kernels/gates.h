// Activations, step sizes and numbers that kernels share.
#pragma once
#include "simd.h"

// A float that came as a size: its bits.
INLINE float number(size_t bits) {
  union { uint32_t u; float f; } as = {(uint32_t)bits};
  return as.f;
}

INLINE float one_exp(float x) { return vexp(splat(x))[0]; }

INLINE vf silu(vf x) { return x / (splat(1.0f) + vexp(-x)); }

// log(1 + u) for 0 <= u <= 1: 2 artanh(s), s = u / (2 + u) <= 1/3, by its series.
INLINE vf log1p_of_unit(vf u) {
  const vf s = u / (splat(2.0f) + u), z = s * s;
  vf p = splat(1.0f / 15);
  p = p * z + splat(1.0f / 13);
  p = p * z + splat(1.0f / 11);
  p = p * z + splat(1.0f / 9);
  p = p * z + splat(1.0f / 7);
  p = p * z + splat(1.0f / 5);
  p = p * z + splat(1.0f / 3);
  return splat(2.0f) * (s + s * z * p);
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)
INLINE vf softplus(vf x) {
  const vf size = (vf)((vi)x & 0x7fffffff);
  return choose(x > zero(), x, zero()) + log1p_of_unit(vexp(-size));
}

INLINE vf clamp(vf x, float low, float high) {
  x = choose(x < splat(low), splat(low), x);
  return choose(x > splat(high), splat(high), x);
}

// All of a vector, or its first `count` floats where fewer than LANES are left.
INLINE vf load_upto(const float *p, size_t count) {
  return count < LANES ? load_part(p, count) : load_f32(p);
}
INLINE void store_upto(float *p, vf x, size_t count) {
  if (count < LANES)
    store_part(p, x, count);
  else
    store(p, x);
}
