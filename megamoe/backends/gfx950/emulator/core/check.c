#include "emu.h"
void check_registers(Wave *w, const Inst *i){(void)w;(void)i;} void check_issue(Wave *w, const Inst *i, int c, int s){(void)w;(void)i;(void)c;(void)s;}
void check_wait(Wave *w, u32 s){(void)w;(void)s;} void check_lds(Wave *w, const Inst *i, u32 a, int b, int wr, int d){(void)w;(void)i;(void)a;(void)b;(void)wr;(void)d;}
void check_global(Wave *w, const Inst *i, u64 a, int b, int wr, int at, int s){(void)w;(void)i;(void)a;(void)b;(void)wr;(void)at;(void)s;}
void check_fence(Wave *w, const Inst *i, int r, int s){(void)w;(void)i;(void)r;(void)s;} void check_barrier(Group*g){(void)g;} void check_wave_start(Wave*w){(void)w;} void check_wave_end(Wave*w){(void)w;}
void check_launch_start(Machine*m,Launch*l){(void)m;(void)l;} void check_launch_end(Machine*m,Launch*l){(void)m;(void)l;} void check_group_start(Group*g){(void)g;} void check_group_end(Group*g){(void)g;} void check_quiet(Machine*m){(void)m;}
void free_shadow(Alloc*a){(void)a;} void check_free(Machine*m){(void)m;}
