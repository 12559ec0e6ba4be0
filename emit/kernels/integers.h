// One row of x as integers of 22 bits, so that products with codes of four bits are sums of byte
// products (AVX-512 VNNI), which round nothing: half the work of widening each code to a float.
//
// x[k] = S n[k], |n| <= 127 2^14, with an S for each 128 inputs, whose codes fill a vector: no more
// than 2^-21 of the largest of them is lost, and that is at most 32 times their mean, or else x
// stays in floats. n = 2^14 a + 2^7 b + c, a with a sign. A code u counts from an integer z of
// its group, next to where its number is 0, or the offset would cancel digits:
//     sum (u - z) n = ((sum u a) 2^7 + sum u b) 2^7 + sum u c - z sum n,
// modulo 2^32, of which only the last has to fit: 8 * 127 * 127 * 2^14 < 2^31, as |u - z| <= 127.
#pragma once
#include "quantized.h"

#if defined(__AVX512VNNI__)

enum { CHUNK_BYTES = 64, CODES = 128, MOST_CHUNKS = 128, MOST_Z = 127 };
typedef struct { __m512i digits[2][3]; } digits_of_chunk;  // of even inputs, of odd ones
typedef struct {
  digits_of_chunk chunks[MOST_CHUNKS];
  vi sum[MOST_CHUNKS];                      // of n, for the eight codes of a lane
  float scale[MOST_CHUNKS];                 // S
  uint32_t group[MOST_CHUNKS][4];           // of four lanes, modulo LANES, in each byte
  float sums[MOST_CHUNKS * 4 + LANES];      // of x, a group each
} integers;

// sum u n of each lane, u those of the low halves of bytes and of the high.
INLINE vi products(const digits_of_chunk *x, const __m512i u[2]) {
  __m512i total = _mm512_setzero_si512();
  for (int digit = 0; digit < 3; digit++) {
    total = _mm512_slli_epi32(total, 7);
    for (int half = 0; half < 2; half++)
      total = _mm512_dpbusd_epi32(total, u[half], x->digits[half][digit]);
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

INLINE vf part_of_x(const float *x, size_t k, size_t K) {
  return k + LANES <= K ? load_f32(x + k) : k < K ? load_part(x + k, K - k) : zero();
}

// The digits of inputs k to k + CODES, zeros beyond K, and their scale; 0 if much would be lost.
INLINE int integers_of_chunk(const float *x, size_t k, size_t K, digits_of_chunk *to,
                             float *scale) {
  vf part[8], most = zero(), total = zero();
  vi n[2][4];
  for (int i = 0; i < 8; i++) {
    part[i] = part_of_x(x, k + i * LANES, K);
    const vf size = (vf)_mm512_abs_ps((__m512)part[i]);
    most = (vf)_mm512_max_ps((__m512)most, (__m512)size);
    total += size;
  }
  const float largest = _mm512_reduce_max_ps((__m512)most), all = sum(total);
  const size_t count = K - k < CODES ? K - k : CODES;
  const int is_zero = all == 0.0f;  // NaN fails all of these
  if (!is_zero && !(largest > 1e-30f && all < 1e30f && largest * count <= 32.0f * all)) return 0;
  const float times = is_zero ? 0.0f : (127 << 14) / largest;
  for (int i = 0; i < 4; i++) {
    const vf one = part[2 * i] * splat(times), other = part[2 * i + 1] * splat(times);
    const vf even = __builtin_shufflevector(one, other, EVEN);
    const vf odd = __builtin_shufflevector(one, other, ODD);
    n[0][i] = (vi)_mm512_cvtps_epi32((__m512)even);
    n[1][i] = (vi)_mm512_cvtps_epi32((__m512)odd);
  }
  for (int half = 0; half < 2; half++) digits_of(n[half], to->digits[half]);
  *scale = is_zero ? 0.0f : 1.0f / times;
  return 1;
}

// 0 if too much of x would be lost.
INLINE int integers_of(const float *x, size_t K, size_t group, integers *to) {
  const __m512i ones[2] = {_mm512_set1_epi8(1), _mm512_set1_epi8(1)};
  size_t of = 0, left = group;
  float total = 0.0f;
  for (size_t g = 0; g < K / group + LANES; g += LANES) store(to->sums + g, zero());
  for (size_t c = 0; c * CODES < K; c++) {
    if (!integers_of_chunk(x, c * CODES, K, &to->chunks[c], &to->scale[c])) return 0;
    to->sum[c] = products(&to->chunks[c], ones);
    vf each = __builtin_convertvector(to->sum[c], vf) * splat(to->scale[c]);
    each += (vf)_mm512_permute_ps((__m512)each, 0xb1);  // the other of two lanes
    each += (vf)_mm512_permute_ps((__m512)each, 0x4e);  // the other two of four
    for (int i = 0; i < 4; i++) {  // four lanes are 32 inputs, of one group
      to->group[c][i] = of % LANES * 0x01010101;
      total += each[4 * i];
      left -= 32;
      if (left) continue;
      to->sums[of++] = total;
      total = 0.0f;
      left = group;
    }
  }
  return 1;
}

// Codes as bytes u: what they stand for is unit (u - z).
typedef struct {
  int looked_up;
  __m512i table;
  float unit;
  vi z;
} bytes_as;

// 0 if the numbers of the sixteen codes are not halves of small integers.
INLINE int bytes_as_integers(vf numbers, bytes_as *to) {
  const vf count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  *to = (bytes_as){0, _mm512_setzero_si512(), 1.0f, (vi)(0)};
  if (_mm512_cmp_ps_mask((__m512)numbers, (__m512)count, _CMP_EQ_OQ) == 0xFFFF) return 1;
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

// `left` bytes of codes and more as bytes of their own: those of the low halves, and of the high.
INLINE void bytes_of_codes(const bytes_as *as, const uint8_t *codes, size_t left, __m512i u[2]) {
  const __mmask64 mask = left < CHUNK_BYTES ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
  const __m512i all = _mm512_maskz_loadu_epi8(mask, codes), low = _mm512_set1_epi8(15);
  u[0] = _mm512_and_si512(all, low);
  u[1] = _mm512_and_si512(_mm512_srli_epi16(all, 4), low);
  if (as->looked_up)
    for (int i = 0; i < 2; i++) u[i] = _mm512_shuffle_epi8(as->table, u[i]);
}

INLINE vi allowed_z(vi z) {
  const __m512i least = _mm512_max_epi32((__m512i)z, _mm512_setzero_si512());
  return (vi)_mm512_min_epi32(least, _mm512_set1_epi32(MOST_Z));
}

// The z of groups of these scales (of a unit) and biases, and what is then left to add.
INLINE vi z_of_bias(vf scale, vf bias, const bytes_as *as, vf *rest) {
  const vf inverse = (vf)_mm512_rcp14_ps((__m512)scale);
  const vi z = allowed_z((vi)_mm512_cvtps_epi32((__m512)(-bias * inverse)) + as->z);
  *rest = __builtin_convertvector(z - as->z, vf) * scale + bias;
  return z;
}

INLINE vi z_of_zero(vf scale, vf zeros, const bytes_as *as, vf *rest) {
  const vi wanted = as->z + (__builtin_convertvector(zeros, vi) << as->looked_up);
  const vi z = allowed_z(wanted);
  *rest = __builtin_convertvector(z - wanted, vf) * scale;
  return z;
}

#endif
