// The few of CPython's functions that cpp/python_module.h calls, so that an extension can be linked into a program without Python:
// a dictionary of capsules is a list of names and handlers (replay.cc).
#pragma once

struct PyObject;
struct PyModuleDef {
  int base;
  const char* name;
  const char* doc;
  long size;
  void *methods, *slots, *traverse, *clear, *free;
};
#define PyModuleDef_HEAD_INIT 0

PyObject* PyModule_Create(PyModuleDef*);
PyObject* PyDict_New();
PyObject* PyCapsule_New(void* pointer, const char* name, void (*destructor)(PyObject*));
int PyDict_SetItemString(PyObject* dict, const char* key, PyObject* value);
int PyModule_AddObject(PyObject*, const char*, PyObject*);
int PyModule_AddStringConstant(PyObject*, const char*, const char* value);
inline void Py_DECREF(PyObject*) {}
