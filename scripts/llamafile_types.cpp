// Let llama.cpp use llamafile's matrix kernels for some quantised weights only.
//
// For most weights, these kernels sum in another order than the kernel for a single token, so that a draft could not be checked
// without changing the reply. For Q4_0, Q5_0 and Q8_0 on processors with AVX2, the sums are the same, and prompts are read
// faster. llama.cpp cannot choose by type, but on Linux a function of a library that was loaded earlier takes precedence over
// one of the same name. edgespec/backends/llamacpp/native.py loads this library before llama.cpp.
#include <cstdint>

namespace {
// Return whether llamafile's kernel for a type of weights sums like the kernel for a single token.
bool sums_alike(int type) {
#if defined(__x86_64__)
    constexpr int Q4_0 = 2, Q5_0 = 6, Q8_0 = 8;  // as in ggml.h
    return (type == Q4_0 || type == Q5_0 || type == Q8_0) && __builtin_cpu_supports("avx2");
#else
    return type < 0;
#endif
}

using Multiply = bool (*)(
    const void * params, int64_t m, int64_t n, int64_t k, const void * a, int64_t lda, const void * b, int64_t ldb, void * c,
    int64_t ldc, int a_type, int b_type, int c_type);

Multiply llamafile = nullptr;
}  // namespace

extern "C" void edgespec_set_llamafile(Multiply function) { llamafile = function; }

// Multiply two matrices, or return false if llama.cpp's own kernel has to do it.
extern "C" bool llamafile_sgemm(
    const void * params, int64_t m, int64_t n, int64_t k, const void * a, int64_t lda, const void * b, int64_t ldb, void * c,
    int64_t ldc, int a_type, int b_type, int c_type) {
    if (llamafile == nullptr || !sums_alike(a_type)) {
        return false;
    }
    return llamafile(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}
