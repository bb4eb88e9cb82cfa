// Calls of XLA's that were written to a file, made again without XLA and without Python: so an extension runs where neither is,
// such as in an emulator of another processor (test_arm64.py).
//
//   replay CALLS RESULTS
//
// It is linked with one extension, unchanged. CALLS is what `recorded` in test_arm64.py writes, RESULTS the bytes of all results.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "Python.h"
#include "xla/ffi/api/c_api.h"

// --- what an extension asks of Python ---

struct Named {
  std::string name;
  XLA_FFI_Handler* handler;
};
static std::vector<Named> handlers;
static PyObject* const kSome = reinterpret_cast<PyObject*>(&handlers);

PyObject* PyModule_Create(PyModuleDef*) { return kSome; }
PyObject* PyDict_New() { return kSome; }
PyObject* PyCapsule_New(void* pointer, const char*, void (*)(PyObject*)) { return static_cast<PyObject*>(pointer); }
int PyDict_SetItemString(PyObject*, const char* key, PyObject* value) {
  handlers.push_back({key, reinterpret_cast<XLA_FFI_Handler*>(value)});
  return 0;
}
int PyModule_AddObject(PyObject*, const char*, PyObject*) { return 0; }
int PyModule_AddStringConstant(PyObject*, const char*, const char* value) {
  std::printf("%s\n", value);
  return 0;
}

extern "C" PyObject* REPLAYED();  // PyInit_ of the extension

// --- what it asks of XLA ---

static XLA_FFI_Error* Fail(XLA_FFI_Error_Create_Args* args) {
  std::printf("refused: %s\n", args->message);
  std::exit(1);
}

static XLA_FFI_Error* TwoThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 2;
  return nullptr;
}

// --- the file ---

class Reader {
 public:
  explicit Reader(const char* path) : file_(std::fopen(path, "rb")) {
    if (file_ == nullptr) std::exit(2);
  }
  void Bytes(void* to, size_t count) {
    if (count != 0 && std::fread(to, 1, count, file_) != count) std::exit(3);
  }
  int64_t Number() {
    int64_t number;
    Bytes(&number, sizeof(number));
    return number;
  }
  // Bytes behind their number. Their memory lasts as long as the program.
  char* Block(int64_t* count) {
    *count = Number();
    char* block = static_cast<char*>(std::malloc(*count + 1));
    Bytes(block, *count);
    block[*count] = 0;
    return block;
  }

 private:
  FILE* file_;
};

static XLA_FFI_Buffer* BufferOf(Reader& in, int64_t* bytes) {
  auto* buffer = new XLA_FFI_Buffer{};
  buffer->struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  buffer->dtype = static_cast<XLA_FFI_DataType>(in.Number());
  int64_t dims;
  buffer->dims = reinterpret_cast<int64_t*>(in.Block(&dims));
  buffer->rank = dims / 8;
  buffer->data = in.Block(bytes);
  return buffer;
}

static void Replay(Reader& in, const XLA_FFI_Api& api, FILE* out) {
  int64_t length;
  const std::string target = in.Block(&length);
  std::vector<XLA_FFI_ArgType> arg_types(in.Number(), XLA_FFI_ArgType_BUFFER);
  std::vector<void*> args;
  for (size_t i = 0; i < arg_types.size(); ++i) args.push_back(BufferOf(in, &length));
  std::vector<XLA_FFI_RetType> ret_types(in.Number(), XLA_FFI_RetType_BUFFER);
  std::vector<void*> rets;
  std::vector<int64_t> sizes(ret_types.size());
  for (size_t i = 0; i < ret_types.size(); ++i) rets.push_back(BufferOf(in, &sizes[i]));
  std::vector<XLA_FFI_AttrType> attr_types(in.Number());
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> attrs;
  for (XLA_FFI_AttrType& type : attr_types) {
    auto* name = new XLA_FFI_ByteSpan{};
    name->ptr = in.Block(&length), name->len = length;
    names.push_back(name);
    const bool is_array = in.Number() != 0;
    const auto dtype = static_cast<XLA_FFI_DataType>(in.Number());
    const int64_t count = in.Number();
    void* data = in.Block(&length);
    type = is_array ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR;
    if (is_array) attrs.push_back(new XLA_FFI_Array{dtype, static_cast<size_t>(count), data});
    else attrs.push_back(new XLA_FFI_Scalar{dtype, data});
  }
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api, frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(), rets.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(attrs.size()), attr_types.data(), names.data(), attrs.data()};
  for (const Named& named : handlers) {
    if (named.name == target) named.handler(&frame);
  }
  for (size_t i = 0; i < rets.size(); ++i) std::fwrite(static_cast<XLA_FFI_Buffer*>(rets[i])->data, 1, sizes[i], out);
}

int main(int, char** argv) {
  REPLAYED();
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = Fail, api.XLA_FFI_ThreadPool_NumThreads = TwoThreads;
  Reader in(argv[1]);
  FILE* out = std::fopen(argv[2], "wb");
  for (int64_t count = in.Number(); count > 0; --count) Replay(in, api, out);
  return std::fclose(out);
}
