//! Compiles the contracts.

fn main() -> std::io::Result<()> {
    let files = ["proto/v1.proto", "proto/v1alpha1.proto"];
    tonic_prost_build::configure().compile_protos(&files, &["proto"])?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
