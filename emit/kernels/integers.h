// One row of x as integers of 22 bits, so that products with codes are sums of byte products
// (AVX-512 VNNI), which have no rounding: a third of the work of widening each code to a float.
//
// x[k] = S n[k], |n| <= 127 2^14, with an S for each chunk of codes that fill a vector: no more than
// 2^-21 of the chunk's largest is lost. n = 2^14 a + 2^7 b + c, a with a sign. A code u counts from an
// integer z of its group, next to where its number is 0, or the offset would cancel digits:
//     sum (u - z) n = ((sum u a) 2^7 + sum u b) 2^7 + sum u c - z sum n,
// modulo 2^32, of which only the last has to fit: 4 255 127 2^14 < 2^31.
#pragma once
#include "quantized.h"

#if defined(__AVX512VNNI__)

enum { WHOLE_BYTES = 64, MOST_CHUNKS = 256, MOST_PRODUCTS = 16384, LEAST_GROUP = 32 };
typedef struct {
  __m512i digits[MOST_PRODUCTS / WHOLE_BYTES][3];  // of even inputs, then of odd if codes have 4 bits
  vi sum[MOST_CHUNKS];                             // of n, for the bytes of a lane
  float scale[MOST_CHUNKS];
  uint32_t group[MOST_CHUNKS][4];  // of four lanes, modulo LANES, in each byte
  float sums[MOST_PRODUCTS / LEAST_GROUP + LANES];  // of x, a group each
} integers;

// sum u n over the four bytes of each lane, and over both halves of a byte.
INLINE vi products(__m512i (*digits)[3], const __m512i *u, const int phases) {
  __m512i total = _mm512_setzero_si512();
  for (int digit = 0; digit < 3; digit++) {
    total = _mm512_slli_epi32(total, 7);
    for (int phase = 0; phase < phases; phase++)
      total = _mm512_dpbusd_epi32(total, u[phase], digits[phase][digit]);
  }
  return (vi)total;
}

// The bytes of 64 numbers from -128 to 127, in their order.
INLINE __m512i bytes_of(const vi n[4]) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i a = _mm512_packs_epi32((__m512i)n[0], (__m512i)n[1]);
  const __m512i b = _mm512_packs_epi32((__m512i)n[2], (__m512i)n[3]);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
}

// The digits of 64 n.
INLINE void digits_of(const vi n[4], __m512i digits[3]) {
  for (int digit = 0; digit < 3; digit++) {
    vi some[4];
    for (int i = 0; i < 4; i++) some[i] = digit ? n[i] >> (14 - 7 * digit) & 127 : n[i] >> 14;
    digits[digit] = bytes_of(some);
  }
}

// Codes as bytes u: what they stand for is unit (u - z).
typedef struct {
  int looked_up;
  __m512i table;
  float unit;
  vi z;
} bytes_as;

// 0 if the numbers of the codes are not halves of small integers. `numbers` are those of 4 bits.
INLINE int bytes_as_integers(vf numbers, const int bits, const int is_signed, bytes_as *to) {
  const vf count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  *to = (bytes_as){0, _mm512_setzero_si512(), 1.0f, (vi)(is_signed ? 128 : 0)};
  if (bits == 8 || _mm512_cmp_ps_mask((__m512)numbers, (__m512)count, _CMP_EQ_OQ) == 0xFFFF)
    return 1;
  const vi twice = __builtin_convertvector(numbers * 2.0f, vi);
  const vf back = __builtin_convertvector(twice, vf) * 0.5f;
  const vf size = (vf)_mm512_abs_ps((__m512)numbers);
  if (_mm512_cmp_ps_mask((__m512)back, (__m512)numbers, _CMP_EQ_OQ) != 0xFFFF ||
      _mm512_cmp_ps_mask((__m512)size, _mm512_set1_ps(31.0f), _CMP_LE_OQ) != 0xFFFF)
    return 0;
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)(twice + 64));
  *to = (bytes_as){1, _mm512_broadcast_i32x4(bytes), 0.5f, (vi)(64)};
  return 1;
}

// The z of groups of these scales and biases, and what is then left of the biases.
INLINE vi z_of_bias(vf scale, vf bias, const bytes_as *as, vf *rest) {
  const vf inverse = (vf)_mm512_rcp14_ps((__m512)(scale * splat(as->unit)));
  const vi near = (vi)_mm512_cvtps_epi32((__m512)(-bias * inverse)) + as->z;
  const __m512i least = _mm512_max_epi32((__m512i)near, _mm512_setzero_si512());
  const vi z = (vi)_mm512_min_epi32(least, _mm512_set1_epi32(255));
  *rest = __builtin_convertvector(z - as->z, vf) * (scale * splat(as->unit)) + bias;
  return z;
}

INLINE vf part_of_x(const float *x, size_t k, size_t K) {
  return k + LANES <= K ? load_f32(x + k) : k < K ? load_part(x + k, K - k) : zero();
}

// The integers of 64 `phases` of x, and their scale.
INLINE float integers_of_chunk(const float *x, size_t k, size_t K, __m512i (*digits)[3],
                               const int phases) {
  const vi all_but_sign = (vi)(0x7fffffff), infinite = (vi)(0x7f800000);
  vf part[8];
  vi most = (vi)(0);
  for (int i = 0; i < 4 * phases; i++) {
    part[i] = part_of_x(x, k + i * LANES, K);
    most = (vi)_mm512_max_epi32((__m512i)most, (__m512i)((vi)part[i] & all_but_sign));
  }
  const int top = _mm512_reduce_max_epi32((__m512i)most);
  if (top >= infinite[0]) return __builtin_nanf("");
  const union { int bits; float value; } largest = {top};
  const float bound = 127 << 14, least = 1e-30f;
  const float to_bound = bound / (largest.value > least ? largest.value : least);
  for (int phase = 0; phase < phases; phase++) {
    vi n[4];
    for (int i = 0; i < 4; i++) {
      vf some = part[i];
      if (phases == 2)
        some = phase ? __builtin_shufflevector(part[2 * i], part[2 * i + 1], ODD)
                     : __builtin_shufflevector(part[2 * i], part[2 * i + 1], EVEN);
      n[i] = (vi)_mm512_cvtps_epi32((__m512)(some * splat(to_bound)));
    }
    digits_of(n, digits[phase]);
  }
  return 1.0f / to_bound;
}

// `phases` is the number of codes in a byte.
INLINE void integers_of(const float *x, size_t K, size_t group, integers *to, const int phases) {
  const size_t codes = WHOLE_BYTES * phases, quad = 16 * phases;  // codes of a chunk, of four lanes
  const __m512i ones[2] = {_mm512_set1_epi8(1), _mm512_set1_epi8(1)};
  size_t of = 0, left = group;
  float total = 0.0f;
  for (size_t g = 0; g < K / group + LANES; g += LANES) store(to->sums + g, zero());
  for (size_t c = 0; c * codes < K; c++) {
    __m512i (*digits)[3] = to->digits + c * phases;
    const float scale = integers_of_chunk(x, c * codes, K, digits, phases);
    const vi sums = products(digits, ones, phases);
    to->sum[c] = sums;
    to->scale[c] = scale;
    vf each = __builtin_convertvector(sums, vf) * splat(scale);
    each += __builtin_shufflevector(each, each, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    each += __builtin_shufflevector(each, each, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    for (int i = 0; i < 4; i++) {
      to->group[c][i] = of % LANES * 0x01010101;
      total += each[4 * i];
      left -= quad;
      if (left) continue;
      to->sums[of++] = total;
      total = 0.0f;
      left = group;
    }
  }
}

#endif
