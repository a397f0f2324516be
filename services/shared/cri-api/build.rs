//! Compiles the contract.

fn main() -> std::io::Result<()> {
    // Credentials have a `Debug` of their own, which omits them.
    tonic_prost_build::configure()
        .skip_debug([".runtime.v1.AuthConfig"])
        .compile_protos(&["proto/services.proto"], &["proto"])?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
