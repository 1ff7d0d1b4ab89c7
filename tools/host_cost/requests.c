// What a process under callgrind says to it.

#include <valgrind/callgrind.h>

int under_valgrind(void) { return (int)RUNNING_ON_VALGRIND; }
void start_counting(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop_counting(void) {
  CALLGRIND_STOP_INSTRUMENTATION;
  CALLGRIND_DUMP_STATS;
}
