// The log: what was launched, encoded and refused since the last reset.

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "null_driver.h"

NullDevice null_device = {90, 132, 232448};
static NullLaunch* launches;
static size_t num_launches, launches_capacity, num_tensor_maps, num_refusals;
static bool notes_parameters;
static size_t launches_to_failure;  // 0: no launch fails
static char last_refusal[512];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void null_choose_device(const NullDevice* chosen) { null_device = *chosen; }

void null_note_parameters(bool wanted) { notes_parameters = wanted; }

void null_fail_launch(size_t number) { launches_to_failure = number; }

bool null_is_to_fail(void) {
  pthread_mutex_lock(&lock);
  bool is_this_one = launches_to_failure == 1;
  if (launches_to_failure > 0) launches_to_failure--;
  pthread_mutex_unlock(&lock);
  return is_this_one;
}

void null_reset(void) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < num_launches; i++) free((void*)launches[i].parameters);
  num_launches = num_tensor_maps = num_refusals = 0;
  last_refusal[0] = '\0';
  pthread_mutex_unlock(&lock);
}

size_t null_num_launches(void) { return num_launches; }
size_t null_num_tensor_maps(void) { return num_tensor_maps; }
size_t null_num_refusals(void) { return num_refusals; }
const NullLaunch* null_launches(void) { return launches; }
const char* null_last_refusal(void) { return last_refusal; }

CUresult null_refuse(CUresult code, const char* format, ...) {
  va_list arguments;
  pthread_mutex_lock(&lock);
  num_refusals++;
  va_start(arguments, format);
  vsnprintf(last_refusal, sizeof last_refusal, format, arguments);
  va_end(arguments);
  pthread_mutex_unlock(&lock);
  return code;
}

void null_note_tensor_map(void) {
  pthread_mutex_lock(&lock);
  num_tensor_maps++;
  pthread_mutex_unlock(&lock);
}

// Parameters where the kernel has them, zeros between.
static void copy_parameters(NullLaunch* launch, CUfunction function, void** parameters) {
  unsigned char* bytes = calloc(1, function->parameter_bytes);
  for (int i = 0; i < function->num_parameters; i++) {
    memcpy(bytes + function->parameters[i].offset, parameters[i], function->parameters[i].size);
  }
  launch->parameters = bytes;
  launch->parameter_bytes = function->parameter_bytes;
}

void null_note_launch(NullLaunch launch, CUfunction function, void** parameters) {
  pthread_mutex_lock(&lock);
  if (num_launches == launches_capacity) {
    launches_capacity = launches_capacity ? 2 * launches_capacity : 1024;
    launches = realloc(launches, launches_capacity * sizeof *launches);
  }
  if (notes_parameters) copy_parameters(&launch, function, parameters);
  launches[num_launches++] = launch;
  pthread_mutex_unlock(&lock);
}
