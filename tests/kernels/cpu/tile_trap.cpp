// Emulates AMX on processors without it. There a tile instruction raises SIGILL; this signal handler computes the
// result of the instruction and continues after it. The tests therefore run the same machine code that a processor with
// AMX runs, with the same tile shapes.
//
// The emulation follows volume 2 of Intel's Software Developer's Manual for LDTILECFG, TILELOADD, TILESTORED, TILEZERO,
// TDPBF16PS, TDPBSSD, TDPBSUD and TILERELEASE, each in one VEX encoding. Where a processor would raise a fault, the process prints the
// reason and aborts.
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

namespace {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64, "what LDTILECFG reads");

thread_local Config config;
thread_local uint8_t tiles[8][16][64];
struct sigaction others;  // what is to be done about instructions that are not ours

struct Instruction {
  int opcode, prefix;  // the last byte of the opcode; 0 none, 1 66, 2 F3, 3 F2
  bool memory;
  int reg, rm, third;  // tiles, where it is not memory
  char* base;
  int64_t stride;
  const uint8_t* next;
};

void need(bool condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "a tile instruction would fault: %s\n", what);
  abort();
}

template <typename T>
T take(const uint8_t*& from) {
  T value;
  memcpy(&value, from, sizeof value);
  from += sizeof value;
  return value;
}

// Returns false if this is not a VEX instruction of the opcode map that contains AMX.
bool decode(const uint8_t* at, const greg_t* registers, Instruction& found) {
  static const int GENERAL[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) return false;
  const int index_high = at[1] & 0x40 ? 0 : 8, base_high = at[1] & 0x20 ? 0 : 8, mod = at[4] >> 6;
  found = Instruction{at[3], at[2] & 3, mod != 3, at[4] >> 3 & 7, at[4] & 7, 15 - (at[2] >> 3 & 15), nullptr, 0, at + 5};
  if (!found.memory) return true;
  int base = found.rm;
  if (base == 4) {
    const int sib = take<uint8_t>(found.next), index = (sib >> 3 & 7) + index_high;
    base = sib & 7;
    if (index != 4) found.stride = registers[GENERAL[index]] << (sib >> 6);
  }
  need(mod != 0 || base != 5, "an address without a base register, which compilers have not made so far");
  const int64_t offset = mod == 1 ? take<int8_t>(found.next) : mod == 2 ? take<int32_t>(found.next) : 0;
  found.base = (char*)(registers[GENERAL[base + base_high]] + offset);
  return true;
}

void load_config(const char* from) {
  memcpy(&config, from, sizeof config);
  memset(tiles, 0, sizeof tiles);
  need(config.palette == 1 && config.start_row == 0, "the palette");
  for (int i = 0; i < 14; i++) need(config.reserved[i] == 0, "reserved bytes of the configuration");
  for (int i = 0; i < 16; i++) {
    need(config.rows[i] <= 16 && config.bytes_per_row[i] <= 64, "a tile larger than 16 rows of 64 bytes");
    need(!config.rows[i] == !config.bytes_per_row[i] && (i < 8 || !config.rows[i]), "half a tile's shape, or a ninth tile");
  }
}

// Subnormal numbers are treated as zero.
float to_float(uint16_t bf16) {
  const uint32_t bits = (bf16 & 0x7f80 ? bf16 : bf16 & 0x8000) * 65536u;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void need_shapes(int out, int a, int b) {
  need(out != a && out != b && a != b, "one tile used twice");
  need(config.rows[out] == config.rows[a] && config.bytes_per_row[out] == config.bytes_per_row[b] &&
           config.bytes_per_row[a] == config.rows[b] * 4,
       "the shapes of three tiles");
}

// Even and odd k are summed separately, then added to each other, then added to the tile. The instruction rounds in
// this order.
void multiply(int out, int a, int b) {
  need_shapes(out, a, b);
  const int columns = config.bytes_per_row[b] / 4;
  for (int m = 0; m < 16; m++) {
    const uint16_t* left = (const uint16_t*)tiles[a][m];
    float *sums = (float*)tiles[out][m], parts[32] = {};
    if (m >= config.rows[out]) memset(sums, 0, 64);
    for (int pair = 0; pair < config.rows[b]; pair++)
      for (int i = 0; i < 2 * columns; i++)
        parts[i] += to_float(left[2 * pair + i % 2]) * to_float(((const uint16_t*)tiles[b][pair])[i]);
    for (int n = 0; n < columns && m < config.rows[out]; n++) sums[n] += parts[2 * n] + parts[2 * n + 1];
  }
}

// Signed bytes of rows times bytes of columns, which are signed or unsigned.
void multiply_bytes(int out, int a, int b, bool is_signed) {
  need_shapes(out, a, b);
  const int columns = config.bytes_per_row[b] / 4;
  for (int m = 0; m < 16; m++) {
    int32_t* sums = (int32_t*)tiles[out][m];
    if (m >= config.rows[out]) memset(sums, 0, 64);
    for (int n = 0; n < columns && m < config.rows[out]; n++)
      for (int i = 0; i < config.rows[b] * 4; i++) {
        const uint8_t right = tiles[b][i / 4][4 * n + i % 4];
        sums[n] += int8_t(tiles[a][m][i]) * (is_signed ? int(int8_t(right)) : int(right));
      }
  }
}

// Returns false if this is not an AMX instruction.
bool execute(const Instruction& it) {
  const int tile = it.reg;
  if (it.opcode == 0x49 && it.prefix == 0) {
    if (it.memory)
      load_config(it.base);
    else
      memset(&config, 0, sizeof config);
    return true;
  }
  if (it.opcode != 0x49 && it.opcode != 0x4b && it.opcode != 0x5c && it.opcode != 0x5e) return false;
  need(config.palette == 1, "no configuration");
  need(config.rows[tile] > 0, "a tile without a shape");
  if (it.opcode == 0x49 && it.prefix == 3) {
    memset(tiles[tile], 0, sizeof tiles[tile]);
  } else if (it.opcode == 0x4b && (it.prefix == 3 || it.prefix == 1)) {
    memset(tiles[tile], 0, sizeof tiles[tile]);
    for (int r = 0; r < config.rows[tile]; r++)
      memcpy(tiles[tile][r], it.base + r * it.stride, config.bytes_per_row[tile]);
  } else if (it.opcode == 0x4b && it.prefix == 2) {
    for (int r = 0; r < config.rows[tile]; r++)
      memcpy(it.base + r * it.stride, tiles[tile][r], config.bytes_per_row[tile]);
  } else if (it.opcode == 0x5c && it.prefix == 2) {
    multiply(tile, it.rm, it.third);
  } else if (it.opcode == 0x5e && it.prefix >= 2) {
    multiply_bytes(tile, it.rm, it.third, it.prefix == 3);
  } else {
    return false;
  }
  return true;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Instruction found;
  if (decode(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers, found) && execute(found))
    registers[REG_RIP] = reinterpret_cast<greg_t>(found.next);
  else
    sigaction(SIGILL, &others, nullptr);  // which the instruction, executed again, then meets
}

__attribute__((constructor)) void install() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &others);
}

}  // namespace
