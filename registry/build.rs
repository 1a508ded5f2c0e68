//! Compiles our subset of etcd's API with protox, so that the build needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=src/etcd/rpc.proto");
    let descriptors = protox::compile(["rpc.proto"], ["src/etcd"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;
    Ok(())
}
