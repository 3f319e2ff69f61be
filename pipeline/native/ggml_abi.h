/* What bmoe assumes about ggml's binary interface, declared here instead of included, so that the
 * hook builds without llama.cpp's headers and says at run time, not by crashing, when the loaded
 * library differs (bm_check_abi in hook.c compares every field used below with the real thing).
 * Values of enumerations are never assumed: they are read off objects made through ggml's API.
 * Written against ggml 0.25 as vendored in llama-cpp-python 0.3.36. */
#ifndef BMOE_GGML_ABI_H
#define BMOE_GGML_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GG_MAX_DIMS = 4, GG_MAX_SRC = 10, GG_OP_PARAM_WORDS = 16, GG_MAX_NAME = 64 };
enum { GG_TYPE_F32 = 0, GG_TYPE_I32 = 26 }; /* types are numbered by the GGUF file format */

struct gg_tensor {
    int type;
    void *buffer;
    int64_t ne[GG_MAX_DIMS];
    size_t nb[GG_MAX_DIMS];
    int op;
    int32_t op_params[GG_OP_PARAM_WORDS];
    int32_t flags;
    struct gg_tensor *src[GG_MAX_SRC];
    struct gg_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[GG_MAX_NAME];
    void *extra;
    char padding[8];
};

typedef void (*gg_custom_fn)(struct gg_tensor *dst, int ith, int nth, void *userdata);

/* The record that a custom op keeps in op_params. */
struct gg_custom_params {
    gg_custom_fn fun;
    int n_tasks;
    void *userdata;
};
enum { GG_N_TASKS_MAX = -1 };

struct gg_type_traits_cpu {
    void (*from_float)(const float *x, void *y, int64_t k);
    void (*vec_dot)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);
    int vec_dot_type;
    int64_t nrows;
};

struct gg_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};

struct gg_cplan {
    size_t work_size;
    uint8_t *work_data;
    int n_threads;
    void *threadpool;
    bool (*abort_callback)(void *);
    void *abort_callback_data;
    bool use_ref;
};

/* A backend's registry record, interface version 2. */
struct gg_backend_reg {
    int api_version;
    const char *(*get_name)(struct gg_backend_reg *);
    size_t (*get_device_count)(struct gg_backend_reg *);
    void *(*get_device)(struct gg_backend_reg *, size_t);
    void *(*get_proc_address)(struct gg_backend_reg *, const char *);
    void *context;
};

/* The functions used, found in the libraries that llama_cpp has loaded. */
struct gg_api {
    /* libggml-base */
    void *(*init)(struct gg_init_params);
    void (*free)(void *ctx);
    size_t (*tensor_overhead)(void);
    size_t (*graph_overhead_custom)(size_t size, bool grads);
    struct gg_tensor *(*new_tensor_2d)(void *ctx, int type, int64_t, int64_t);
    struct gg_tensor *(*new_tensor_3d)(void *ctx, int type, int64_t, int64_t, int64_t);
    struct gg_tensor *(*view_2d)(void *ctx, struct gg_tensor *, int64_t, int64_t, size_t, size_t);
    struct gg_tensor *(*set_name)(struct gg_tensor *, const char *);
    struct gg_tensor *(*mul_mat_id)(void *ctx, struct gg_tensor *, struct gg_tensor *, struct gg_tensor *);
    struct gg_tensor *(*custom_4d)(void *ctx, int type, int64_t, int64_t, int64_t, int64_t,
                                   struct gg_tensor **args, int n_args, gg_custom_fn fun, int n_tasks,
                                   void *userdata);
    void *(*new_graph_custom)(void *ctx, size_t size, bool grads);
    void (*build_forward_expand)(void *graph, struct gg_tensor *);
    void *(*get_data)(const struct gg_tensor *);
    size_t (*type_size)(int type);
    size_t (*row_size)(int type, int64_t ne);
    /* libggml-cpu */
    const struct gg_type_traits_cpu *(*type_traits_cpu)(int type);
    struct gg_cplan (*graph_plan)(const void *graph, int n_threads, void *threadpool);
    int (*graph_compute)(void *graph, struct gg_cplan *);
    struct gg_backend_reg *(*cpu_reg)(void);
    void (*cpu_init)(void);
};

#endif
