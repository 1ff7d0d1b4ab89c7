/* Client requests of callgrind, for ctypes. */
#include <valgrind/callgrind.h>

/* Once a process: valgrind translates all code anew where it begins to count. */
void host_cost_begin(void) { CALLGRIND_START_INSTRUMENTATION; }

void host_cost_start(void) { CALLGRIND_ZERO_STATS; }

/* Writes what was counted since the start to a file of its own, in which `label` stands. */
void host_cost_stop(const char* label) { CALLGRIND_DUMP_STATS_AT(label); }
