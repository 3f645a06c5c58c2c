// Where the packed bytes of a linear layer lie. Output channels are cut into tiles of kLanes; each tile is one contiguous
// panel, read front to back, so that a product streams the weights once.
//
//   f32, f16  panel: [k_padded][kLanes] values
//   bf16      panel: [k_padded / 2][kLanes][2] values: two consecutive k per 32-bit slot
//   f8        panel: blocks of one group: [group][kLanes] bytes, then fp32 scales [kLanes], times 2^8 (what load_f8_pair lacks)
//   w8, w4, t4  panel: blocks of max(group, 32) inputs: for each 32 of them
//               w8: 8 steps [kLanes][4] int8 (step s holds k = 4s .. 4s+3)
//               w4, t4: 4 pairs of steps [kLanes][4] bytes (pair s holds k = 4s .. 4s+3 in the low and 4s+16 .. 4s+19 in the high nibbles)
//             then scales [kLanes], fp16 or fp32 if wide; w8 with groups of 16: [2][kLanes]
//             then minimums or zero points likewise if there are, fp16
// Channels beyond n and inputs beyond k are zero, scales included.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {

struct Layout {
  int64_t tiles;                 // of kLanes channels
  int64_t groups;                // of kGroup inputs
  int64_t blocks;                // that share scales: of max(group, kGroup) inputs; plain weights: as groups
  int64_t units;                 // groups of kGroup inputs in a block
  int scales_per_block;          // per channel: w8 with groups of 16 has 2
  size_t unit_bytes;             // codes of kGroup inputs of one tile
  size_t block_bytes;            // of one tile
  size_t scales_at, offsets_at;  // in a block
  size_t panel_bytes;            // of one tile
};

inline Layout layout_of(const PackedW& w) {
  Layout l{};
  l.tiles = (w.n + kLanes - 1) / kLanes;
  l.groups = w.k_padded / kGroup;
  const bool grouped = w.group != 0;
  l.units = grouped && w.group > kGroup ? w.group / kGroup : 1;
  l.blocks = l.groups / l.units;
  switch (w.kind) {
    case WeightKind::f32:
      l.unit_bytes = size_t(kGroup) * kLanes * 4;
      break;
    case WeightKind::f16:
    case WeightKind::bf16:
      l.unit_bytes = size_t(kGroup) * kLanes * 2;
      break;
    case WeightKind::w8:
    case WeightKind::f8:
      l.unit_bytes = size_t(kGroup) * kLanes;
      break;
    case WeightKind::w4:
    case WeightKind::t4:
      l.unit_bytes = size_t(kGroup) * kLanes / 2;
      break;
  }
  l.scales_at = l.unit_bytes * size_t(l.units);
  l.offsets_at = l.block_bytes = l.scales_at;
  if (grouped) {
    l.scales_per_block = w.group < kGroup ? kGroup / w.group : 1;
    const size_t values = size_t(l.scales_per_block) * kLanes;
    l.offsets_at = l.scales_at + values * (w.wide ? 4 : 2);
    l.block_bytes = l.offsets_at + (w.offset == Offset::code ? 0 : values * 2);
  }
  l.panel_bytes = l.block_bytes * size_t(l.blocks);
  return l;
}

inline int64_t pad_k(int64_t k) { return (k + kGroup - 1) / kGroup * kGroup; }

}  // namespace octavo::OCTAVO_NS
