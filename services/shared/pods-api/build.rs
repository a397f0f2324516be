//! Compiles the contract.

fn main() -> std::io::Result<()> {
    tonic_prost_build::configure().compile_protos(&["proto/pods.proto"], &["proto"])?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
