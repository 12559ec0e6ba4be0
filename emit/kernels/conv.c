// Causal depthwise convolution with its activation, of any number of tokens.
//
//   y[t, c] = act(bias[c] + sum_k weight[k, c] u[t - (K - 1) + k, c])
//
// u is the tail (the K - 1 inputs before these) and then x, whose rows are columns of wider ones.
// The new tail is the last K - 1 of the tail and the first `length` inputs.
#include "gates.h"

enum { CONV_TAPS = 8, CONV_SILU = 1 };

// Input number t of a row; those before it are in the tail.
INLINE const float *conv_input(const float *x, const float *tail, ptrdiff_t t, size_t width,
                               size_t C, size_t K) {
  return t < 0 ? tail + (t + (ptrdiff_t)K - 1) * (ptrdiff_t)C : x + t * (ptrdiff_t)width;
}

// `count` <= LANES channels of one row, for K taps.
INLINE void conv_channels(const float *x, const float *weight, const float *bias, const float *tail,
                          float *y, float *new_tail, size_t T, size_t C, size_t length,
                          size_t width, int act, size_t count, const size_t K) {
  vf w[CONV_TAPS];
  if (K <= CONV_TAPS)
    for (size_t k = 0; k < K; k++) w[k] = load_upto(weight + k * C, count);
  const vf first = bias ? load_upto(bias, count) : zero();
  for (size_t t = 0; t < T; t++) {
    vf v = first;
    for (size_t k = 0; k < K; k++) {
      const float *u = conv_input(x, tail, (ptrdiff_t)(t + k) - (ptrdiff_t)(K - 1), width, C, K);
      v += load_upto(u, count) * (K <= CONV_TAPS ? w[k] : load_upto(weight + k * C, count));
    }
    store_upto(y + t * C, act == CONV_SILU ? silu(v) : v, count);
  }
  for (size_t k = 0; k + 1 < K; k++) {
    const float *u = conv_input(x, tail, (ptrdiff_t)(length + k) - (ptrdiff_t)(K - 1), width, C, K);
    store_upto(new_tail + k * C, load_upto(u, count), count);
  }
}

// Tile number `tile`: `per` channels, a multiple of LANES, of one row of the batch.
EXPORT scanwright_conv(const float *x, const int32_t *lengths, const float *weight,
                       const float *bias, const float *tail, float *y, float *new_tail, size_t T,
                       size_t C, size_t K, size_t width, size_t start, size_t biased, size_t act,
                       size_t per, size_t tile) {
  const size_t tiles = (C + per - 1) / per, b = tile / tiles, from = tile % tiles * per;
  const size_t to = from + per < C ? from + per : C;
  const size_t length = lengths[b] < 0 ? 0 : (size_t)lengths[b] > T ? T : (size_t)lengths[b];
  x += b * T * width + start;
  y += b * T * C;
  tail += b * (K - 1) * C;
  new_tail += b * (K - 1) * C;
  for (size_t c = from; c < to; c += LANES) {
    const size_t count = to - c < LANES ? to - c : LANES;
    const float *of_bias = biased ? bias + c : 0;
#define CHANNELS(count, K)                                                                         \
  conv_channels(x + c, weight + c, of_bias, tail + c, y + c, new_tail + c, T, C, length, width,    \
                (int)act, count, K)
    if (count < LANES)
      CHANNELS(count, K);
    else if (K == 4)
      CHANNELS(LANES, 4);
    else
      CHANNELS(LANES, K);
#undef CHANNELS
  }
}
