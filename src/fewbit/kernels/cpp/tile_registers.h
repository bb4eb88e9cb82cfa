// The shapes of AMX's eight tile registers. Included in the namespace of its instruction set.

// As `ldtilecfg` reads them. Loading them waits for all instructions before, and clears the registers.
struct alignas(64) TileRegisters {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void Shape(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows), row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
  void Load() const { _tile_loadconfig(this); }
};
