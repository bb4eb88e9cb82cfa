// A Python module that holds nothing but XLA FFI handlers, each in the capsule that jax.ffi.register_ffi_target takes.
//
//   FEWBIT_MODULE(_quantize, {"fewbit_quantize", reinterpret_cast<void*>(quantize)})
//
// makes the module `_quantize` with the dictionary `TARGETS` (name to capsule) and two texts: `ISA`, the instruction set that the
// kernels take on this machine, and `SOURCES`, the fingerprint of what it was built from, which setup.py defines. It is written
// against CPython's own C interface, so that the build needs no binding library.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "isa.h"

#ifndef FEWBIT_SOURCES
#define FEWBIT_SOURCES ""
#endif

namespace fewbit {

struct Target {
  const char* name;
  void* handler;
};

// The module with these targets; null with a Python error set when memory runs out.
template <int count>
PyObject* ModuleOf(PyModuleDef* definition, const Target (&targets)[count]) {
  PyObject* module = PyModule_Create(definition);
  PyObject* capsules = PyDict_New();
  if (module == nullptr || capsules == nullptr) return nullptr;
  for (const Target& target : targets) {
    PyObject* capsule = PyCapsule_New(target.handler, "xla._CUSTOM_CALL_TARGET", nullptr);
    if (capsule == nullptr || PyDict_SetItemString(capsules, target.name, capsule) != 0) return nullptr;
    Py_DECREF(capsule);
  }
  if (PyModule_AddObject(module, "TARGETS", capsules) != 0) return nullptr;
#if defined(FEWBIT_BYTE_DOT) && FEWBIT_BYTE_DOT
  const Isa best = ByteDotIsaOf(-1);
#elif defined(FEWBIT_HAS_AMX_KERNELS) && FEWBIT_HAS_AMX_KERNELS
  const Isa best = TileIsaOf(-1);
#else
  const Isa best = BestIsa();
#endif
  if (PyModule_AddStringConstant(module, "ISA", NameOf(best)) != 0) return nullptr;
  if (PyModule_AddStringConstant(module, "SOURCES", FEWBIT_SOURCES) != 0) return nullptr;
  return module;
}

}  // namespace fewbit

#define FEWBIT_MODULE(module, ...)                                                                    \
  extern "C" __attribute__((visibility("default"))) PyObject* PyInit_##module() {                     \
    static const fewbit::Target targets[] = {__VA_ARGS__};                                            \
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, #module, nullptr, -1, nullptr, nullptr,   \
                                     nullptr,               nullptr, nullptr};                        \
    return fewbit::ModuleOf(&definition, targets);                                                    \
  }
