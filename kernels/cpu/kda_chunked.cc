#include "kernels/cpu/kda_chunked.h"

#include <algorithm>
#include <cmath>
#include <vector>

// Notation of spec 4: within a chunk of C tokens, G_i is the sum of the log-decays of its first i tokens (inclusive),
//   A_ij = beta_i sum_c k_i k_j e^{G_i - G_j}  (i > j),   M_ij = sum_c q_i k_j e^{G_i - G_j}  (i >= j),
//   Tm = (I + A)^-1,  W = Tm (beta k e^G),  U = Tm (beta v),
//   Vn = U - W S0,  O = (q e^G) S0 + M Vn,  S' = diag(e^{G_C}) S0 + (k e^{G_C - G})^T Vn.
// W, U, A, M and Tm do not depend on the state; on a device they are made for all chunks at once.
//
// Differences of G are never formed by subtracting two long sums: after one decay of -5000, G has lost the small decays
// that follow. Every exponent is a sum of decays of one sign over exactly the tokens between its ends, from per-tile
// prefixes, suffixes and totals.
namespace k3 {
namespace {

using Matrix = std::vector<float>;  // row-major

class Chunk {
 public:
  Chunk(const KdaChunkedParams& p, int64_t begin)
      : p_(p), begin_(begin), rows_(static_cast<int>(std::min<int64_t>(kKdaChunk, p.tokens - begin))), d_(p.head_dim) {
    SumDecays();
  }

  void Run() {
    BuildProducts();
    InvertLower();
    ApplyToState();
  }

 private:
  int tiles() const { return (rows_ + kKdaTile - 1) / kKdaTile; }
  int tile_end(int tile) const { return std::min(rows_, (tile + 1) * kKdaTile); }
  const float* q(int i) const { return p_.q + (begin_ + i) * p_.stride; }
  const float* k(int i) const { return p_.k + (begin_ + i) * p_.stride; }
  const float* v(int i) const { return p_.v + (begin_ + i) * p_.stride; }
  const float* g(int i) const { return p_.g + (begin_ + i) * p_.stride; }
  float beta(int i) const { return p_.beta[(begin_ + i) * p_.beta_stride]; }
  float& a(int i, int j) { return a_[i * kKdaChunk + j]; }
  float& m(int i, int j) { return m_[i * kKdaChunk + j]; }
  float& inverse(int i, int j) { return inverse_[i * kKdaChunk + j]; }

  void SumDecays() {
    prefix_.assign(rows_ * d_, 0.0f);
    suffix_.assign(rows_ * d_, 0.0f);
    total_.assign(tiles() * d_, 0.0f);
    for (int tile = 0; tile < tiles(); ++tile) {
      const int first = tile * kKdaTile, end = tile_end(tile);
      for (int64_t c = 0; c < d_; ++c) {
        float sum = 0;
        for (int i = first; i < end; ++i) prefix_[i * d_ + c] = sum += g(i)[c];
        total_[tile * d_ + c] = sum;
        sum = 0;
        for (int i = end - 1; i >= first; --i) {
          suffix_[i * d_ + c] = sum;
          sum += g(i)[c];
        }
      }
    }
  }
  // Decay of tiles [from, to).
  float Between(int from, int to, int64_t c) const {
    float sum = 0;
    for (int tile = from; tile < to; ++tile) sum += total_[tile * d_ + c];
    return sum;
  }
  // G_i: from the chunk's start through token i.
  float FromStart(int i, int64_t c) const { return Between(0, i / kKdaTile, c) + prefix_[i * d_ + c]; }
  // G_C - G_i: after token i to the chunk's end.
  float ToEnd(int i, int64_t c) const { return suffix_[i * d_ + c] + Between(i / kKdaTile + 1, tiles(), c); }

  // A (strictly lower) and M (lower with diagonal), tile by tile.
  void BuildProducts() {
    a_.assign(rows_ * kKdaChunk, 0.0f);
    m_.assign(rows_ * kKdaChunk, 0.0f);
    for (int row_tile = 0; row_tile < tiles(); ++row_tile) {
      for (int column_tile = 0; column_tile < row_tile; ++column_tile) OffDiagonalTile(row_tile, column_tile);
      if (p_.gate_kind == KdaGate::kBounded) {
        BoundedDiagonalTile(row_tile);
      } else {
        UnboundedDiagonalTile(row_tile);
      }
    }
    for (int i = 0; i < rows_; ++i) {
      for (int j = 0; j < i; ++j) a(i, j) *= beta(i);
    }
  }

  // sum_c x_i[c] e^{left[i][c]} y_j[c] e^{right[j][c]} for i in the row tile, j in the column tile, as a product of two
  // scaled operands. Entries above the diagonal are dropped after the product: scaling them away could meet infinity.
  template <typename Left, typename Right>
  void ProductTile(int row_tile, int column_tile, const Left& left, const Right& right) {
    const int i0 = row_tile * kKdaTile, j0 = column_tile * kKdaTile;
    Matrix scaled_k(kKdaTile * d_), scaled_q(kKdaTile * d_), keys(kKdaTile * d_);
    for (int i = i0; i < tile_end(row_tile); ++i) {
      for (int64_t c = 0; c < d_; ++c) {
        const float decay = std::exp(left(i, c));
        scaled_k[(i - i0) * d_ + c] = k(i)[c] * decay;
        scaled_q[(i - i0) * d_ + c] = q(i)[c] * decay;
      }
    }
    for (int j = j0; j < tile_end(column_tile); ++j) {
      for (int64_t c = 0; c < d_; ++c) keys[(j - j0) * d_ + c] = k(j)[c] * std::exp(right(j, c));
    }
    for (int i = i0; i < tile_end(row_tile); ++i) {
      for (int j = j0; j < tile_end(column_tile); ++j) {
        const float* key = keys.data() + (j - j0) * d_;
        if (i > j) a(i, j) = Dot(scaled_k.data() + (i - i0) * d_, key);
        if (i >= j) m(i, j) = Dot(scaled_q.data() + (i - i0) * d_, key);
      }
    }
  }

  // Anchor: the start of the row tile. Both exponents are at most 0, whatever the gate: they can only underflow.
  void OffDiagonalTile(int row_tile, int column_tile) {
    ProductTile(
        row_tile, column_tile, [&](int i, int64_t c) { return prefix_[i * d_ + c]; },
        [&](int j, int64_t c) { return suffix_[j * d_ + c] + Between(column_tile + 1, row_tile, c); });
  }

  // Anchor: the token in the middle of the tile, which with decays of at least -5 keeps exponents within +-40.
  void BoundedDiagonalTile(int tile) {
    const int first = tile * kKdaTile, end = tile_end(tile);
    const int anchor = std::min(first + kKdaTile / 2, end - 1);
    Matrix relative(kKdaTile * d_);  // G_i - G_anchor, summed outwards from the anchor
    for (int64_t c = 0; c < d_; ++c) {
      float sum = 0;
      for (int i = anchor + 1; i < end; ++i) relative[(i - first) * d_ + c] = sum += g(i)[c];
      sum = 0;
      for (int i = anchor; i > first; --i) relative[(i - 1 - first) * d_ + c] = sum -= g(i)[c];
    }
    ProductTile(
        tile, tile, [&](int i, int64_t c) { return relative[(i - first) * d_ + c]; },
        [&](int j, int64_t c) { return -relative[(j - first) * d_ + c]; });
  }

  // No anchor fits decays without a bound: every pair has its own exponent, the decay of the tokens between.
  void UnboundedDiagonalTile(int tile) {
    const int first = tile * kKdaTile;
    Matrix between(d_);
    for (int i = first; i < tile_end(tile); ++i) {
      std::fill(between.begin(), between.end(), 0.0f);
      for (int j = i; j >= first; --j) {
        float kk = 0, qk = 0;
        for (int64_t c = 0; c < d_; ++c) {
          const float key = k(j)[c] * std::exp(between[c]);
          kk = std::fma(k(i)[c], key, kk);
          qk = std::fma(q(i)[c], key, qk);
          between[c] += g(j)[c];
        }
        if (i > j) a(i, j) = kk;
        m(i, j) = qk;
      }
    }
  }

  // Tm = (I + A)^-1. Diagonal tiles by forward substitution in fp32: with correlated keys the product form
  // (I - A)(I + A^2)(I + A^4)(I + A^8) passes through values a thousand times the result. Then the tiles below, by
  // increasing distance from the diagonal: Tm[i,j] = -X_i sum_{j <= m < i} A[i,m] Tm[m,j].
  void InvertLower() {
    inverse_.assign(rows_ * kKdaChunk, 0.0f);
    for (int tile = 0; tile < tiles(); ++tile) {
      const int first = tile * kKdaTile;
      for (int i = first; i < tile_end(tile); ++i) {
        inverse(i, i) = 1;
        for (int j = first; j < i; ++j) {
          float sum = 0;
          for (int l = j; l < i; ++l) sum = std::fma(a(i, l), inverse(l, j), sum);
          inverse(i, j) = -sum;
        }
      }
    }
    for (int distance = 1; distance < tiles(); ++distance) {
      for (int row_tile = distance; row_tile < tiles(); ++row_tile) InverseTile(row_tile, row_tile - distance);
    }
  }

  void InverseTile(int row_tile, int column_tile) {
    const int i0 = row_tile * kKdaTile, j0 = column_tile * kKdaTile;
    Matrix sum(kKdaTile * kKdaTile, 0.0f);
    for (int i = i0; i < tile_end(row_tile); ++i) {
      for (int l = j0; l < i0; ++l) {
        for (int j = j0; j < tile_end(column_tile); ++j) {
          float& entry = sum[(i - i0) * kKdaTile + j - j0];
          entry = std::fma(a(i, l), inverse(l, j), entry);
        }
      }
    }
    for (int i = i0; i < tile_end(row_tile); ++i) {
      for (int l = i0; l <= i; ++l) {
        for (int j = j0; j < tile_end(column_tile); ++j) {
          inverse(i, j) = std::fma(-inverse(i, l), sum[(l - i0) * kKdaTile + j - j0], inverse(i, j));
        }
      }
    }
  }

  // The sequential part: reads S0 once for Vn and O, then advances it.
  void ApplyToState() {
    // W and U, rows of the WY pair.
    Matrix w(rows_ * d_, 0.0f), vn(rows_ * d_, 0.0f), decayed(rows_ * d_);
    for (int i = 0; i < rows_; ++i) {
      for (int64_t c = 0; c < d_; ++c) decayed[i * d_ + c] = k(i)[c] * std::exp(FromStart(i, c));
    }
    for (int i = 0; i < rows_; ++i) {
      for (int j = 0; j <= i; ++j) {
        const float factor = inverse(i, j) * beta(j);
        AddScaled(factor, decayed.data() + j * d_, w.data() + i * d_);
        AddScaled(factor, v(j), vn.data() + i * d_);
      }
    }
    // Vn = U - W S0
    for (int i = 0; i < rows_; ++i) {
      Matrix prediction(d_, 0.0f);
      for (int64_t c = 0; c < d_; ++c) AddScaled(w[i * d_ + c], p_.state + c * d_, prediction.data());
      AddScaled(-1.0f, prediction.data(), vn.data() + i * d_);
    }
    // O = (q e^G) S0 + M Vn
    for (int i = 0; i < rows_; ++i) {
      float* out = p_.out + (begin_ + i) * p_.stride;
      std::fill(out, out + d_, 0.0f);
      for (int64_t c = 0; c < d_; ++c) AddScaled(q(i)[c] * std::exp(FromStart(i, c)), p_.state + c * d_, out);
      for (int j = 0; j <= i; ++j) AddScaled(m(i, j), vn.data() + j * d_, out);
    }
    // S' = diag(e^{G_C}) S0 + (k e^{G_C - G})^T Vn. The decay enters as S0 + (e^{G_C} - 1) S0 where it is slow, so that
    // its rounding does not build up over the chunks.
    for (int64_t c = 0; c < d_; ++c) {
      float* row = p_.state + c * d_;
      const float decay = Between(0, tiles(), c);
      if (decay > -0.5f) {
        const float lost = std::expm1(decay);
        for (int64_t x = 0; x < d_; ++x) row[x] = std::fma(lost, row[x], row[x]);
      } else {
        const float kept = std::exp(decay);
        for (int64_t x = 0; x < d_; ++x) row[x] *= kept;
      }
      for (int i = 0; i < rows_; ++i) AddScaled(k(i)[c] * std::exp(ToEnd(i, c)), vn.data() + i * d_, row);
    }
  }

  float Dot(const float* x, const float* y) const {
    float sum = 0;
    for (int64_t c = 0; c < d_; ++c) sum = std::fma(x[c], y[c], sum);
    return sum;
  }
  void AddScaled(float factor, const float* x, float* y) const {
    for (int64_t c = 0; c < d_; ++c) y[c] += factor * x[c];
  }

  const KdaChunkedParams& p_;
  const int64_t begin_;
  const int rows_;
  const int64_t d_;
  // Decays within a tile, [rows, d]: from its start through the row, and after the row to its end; and whole tiles.
  Matrix prefix_, suffix_, total_;
  Matrix a_, m_, inverse_;  // [rows, kKdaChunk]
};

}  // namespace

void KdaChunked(const KdaChunkedParams& params) {
  for (int64_t begin = 0; begin < params.tokens; begin += kKdaChunk) Chunk(params, begin).Run();
}

}  // namespace k3
