/* Captures, graphs and what graphs retain, as both fake drivers have them. A graph's handle is its capture's id. */
enum { kCaptures = 8, kObjects = 64, kImplicit = 906 };

static struct {
  void* stream;
  unsigned long long id;
} captures[kCaptures];
static struct {
  void *graph, *data;
  void (*destroy)(void*);
} objects[kObjects];
int fake_objects = 0; /* alive */

/* A stream joins the capture `id`, or with 0 leaves the one that it is in. */
void fake_capture(void* stream, unsigned long long id) {
  for (int i = 0; i < kCaptures; ++i)
    if (captures[i].stream == stream || !captures[i].stream) {
      captures[i].stream = stream, captures[i].id = id;
      return;
    }
}
/* The graph of the capture `id` is gone. */
void fake_release(unsigned long long id) {
  for (int i = 0; i < kObjects; ++i)
    if (objects[i].destroy && objects[i].graph == (void*)id) {
      void (*destroy)(void*) = objects[i].destroy;
      objects[i].destroy = 0, --fake_objects, destroy(objects[i].data);
    }
}

static int get_capture_info(void* stream, int* status, unsigned long long* id, void** graph) {
  *status = 0;
  for (int i = 0; i < kCaptures; ++i) {
    if (captures[i].id && !stream) return kImplicit;
    if (captures[i].id && captures[i].stream == stream)
      *status = 1, *id = captures[i].id, *graph = (void*)captures[i].id;
  }
  return 0;
}
static int create_user_object(void** object, void* data, void (*destroy)(void*), unsigned references, unsigned flags) {
  int i = 0;
  while (i < kObjects && objects[i].destroy) ++i;
  if (i == kObjects || references != 1 || flags != 1) return 1;
  objects[i].graph = 0, objects[i].data = data, objects[i].destroy = destroy, ++fake_objects;
  return *object = &objects[i], 0;
}
static int retain_user_object(void* graph, void* object, unsigned references, unsigned flags) {
  if (!graph || references != 1 || flags != 1) return 1;
  return *(void**)object = graph, 0;
}
