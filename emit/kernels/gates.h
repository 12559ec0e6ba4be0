// Activations, step sizes and numbers that kernels share.
#pragma once
#include "simd.h"

// A float that came as a size: its bits.
INLINE float number(size_t bits) {
  union { uint32_t u; float f; } as = {(uint32_t)bits};
  return as.f;
}

INLINE float one_exp(float x) { return vexp(splat(x))[0]; }

// e^x, or 0 where that is less than 1e-26. A sum that holds the newest input loses nothing by it, and
// products with it are no denormal numbers, which many CPUs take a hundred times as long for.
INLINE vf faded_exp(vf x) { return choose(x < splat(-60.0f), zero(), vexp(x)); }

// 2^x for x <= 0 within 1e-7 of it, 1 at 0 exactly, never less than 2^-126: 2^n (1 + r q(r)), |r| <=
// 1/2, q fitted so that the largest relative error is least (1.6e-8 before rounding).
INLINE vf power_of_two(vf x) {
  const vf low = splat(-126.0f), whole = splat(12582912.0f);  // 1.5 * 2^23
  const vf y = choose(x < low, low, x), shifted = y + whole, r = y - (shifted - whole);
  vf q = splat(0.000153532761f);
  q = q * r + splat(0.0013398875f);
  q = q * r + splat(0.00961843785f);
  q = q * r + splat(0.0555033237f);
  q = q * r + splat(0.240226477f);
  q = q * r + splat(0.693147182f);
  return (q * r + splat(1.0f)) * (vf)(((vu)shifted - (vu)whole + 127) << 23);
}

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

// A store past the caches, of what is not read again soon: the line is then not read first. Followed
// by `stored` before another thread reads it.
INLINE int streams(const float *p, size_t stride) {
  return (uintptr_t)p % sizeof(vf) == 0 && stride % LANES == 0;
}
INLINE void stream(float *p, vf x) { __builtin_nontemporal_store(x, (vf *)p); }
INLINE void stored(void) {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

INLINE void store_upto(float *p, vf x, size_t count) {
  if (count < LANES)
    store_part(p, x, count);
  else
    store(p, x);
}
