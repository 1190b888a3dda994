#!/bin/sh
# Make an environment with llama.cpp, its server and its Python binding:  sh setup_llama_cpp.sh DIR [PYTHON]
#
# It is compiled for this processor, from the source that llama-cpp-python brings: the library once, for the binding and
# the server alike. Needs a C++ compiler, and ten minutes or more on two cores (CMAKE_BUILD_PARALLEL_LEVEL says how many
# work at a time).
set -eu

. "$(dirname "$0")/new_environment.sh"
version=0.3.36

"$python" -m venv "$environment"
environment=$(cd "$environment" && pwd)
pip="$environment/bin/pip"
"$pip" install cmake==4.1.0 ninja==1.13.0 gguf==0.19.0 numpy
"$pip" download -q --no-deps --no-binary llama-cpp-python --dest "$environment/source" "llama-cpp-python==$version"
tar -xzf "$environment/source/llama_cpp_python-$version.tar.gz" -C "$environment/source"
source="$environment/source/llama_cpp_python-$version"

# The optional parts are left out: pages for browsers (they would be fetched), HTTPS, tests, examples.
"$environment/bin/cmake" -S "$source/vendor/llama.cpp" -B "$environment/build" -G Ninja \
    -DCMAKE_MAKE_PROGRAM="$environment/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_OPENSSL=OFF
"$environment/bin/cmake" --build "$environment/build" --target llama-server

CMAKE_ARGS=-DLLAMA_BUILD=OFF "$pip" install "$source"
LLAMA_CPP_LIB_PATH="$environment/build/bin" "$environment/bin/python" -c \
    "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__); print(llama_cpp.llama_print_system_info().decode())"
"$environment/build/bin/llama-server" --version
