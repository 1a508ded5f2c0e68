//! Compiles the .proto files with protox, so that the build needs no `protoc`.

use prost::Message as _;

const PROTOS: [&str; 7] = [
    "baton/v1/common.proto",
    "baton/v1/inference.proto",
    "baton/v1/prefill.proto",
    "baton/v1/decode.proto",
    "baton/v1/pool.proto",
    "baton/v1/cluster.proto",
    "baton/v1/group.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("baton_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
