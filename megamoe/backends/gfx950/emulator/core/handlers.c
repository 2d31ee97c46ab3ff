/* Every instruction handler by name. */
#include "emu.h"

extern const OpEntry scalar_ops[], control_ops[], valu_int_ops[], valu_float_ops[], valu_cmp_ops[], valu_half_ops[], valu_small_ops[], valu_scaled_ops[], modifier_ops[], mfma_ops[], vmem_ops[], buffer_ops[], atomic_ops[], ds_ops[];
static const OpEntry *const FAMILIES[] = {scalar_ops, control_ops, valu_int_ops, valu_float_ops, valu_cmp_ops, valu_half_ops, valu_small_ops, valu_scaled_ops, modifier_ops, mfma_ops, vmem_ops, buffer_ops, atomic_ops, ds_ops, 0};


u64 emu_handler(const char *name) {
  for (int f = 0; FAMILIES[f]; f++)
    for (const OpEntry *e = FAMILIES[f]; e->name; e++)
      if (!strcmp(e->name, name)) return (u64)(uintptr_t)e->fn;
  return 0;
}
u64 emu_unimplemented(void) { return (u64)(uintptr_t)op_unimplemented; }
u64 emu_modified(void) { return (u64)(uintptr_t)exec_modified; }
u32 emu_sizeof(u32 what) { return what == 0 ? sizeof(Inst) : what == 1 ? sizeof(Finding) : what == 2 ? sizeof(Fault) : sizeof(Traffic); }
u32 emu_num_ops(void) {
  u32 n = 0;
  for (int f = 0; FAMILIES[f]; f++) for (const OpEntry *e = FAMILIES[f]; e->name; e++) n++;
  return n;
}
const char *emu_op_name(u32 k) {
  for (int f = 0; FAMILIES[f]; f++) for (const OpEntry *e = FAMILIES[f]; e->name; e++) if (!k--) return e->name;
  return 0;
}
