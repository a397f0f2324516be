//! Compiles the contracts.
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let areas = ["common", "runtime", "pleg", "probe", "status", "podsync", "debug"];
    let files: Vec<String> = areas.iter().map(|a| format!("quintlet/{a}/v1/{a}.proto")).collect();
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    tonic_prost_build::configure()
        .file_descriptor_set_path(out.join("quintlet.bin"))
        .compile_protos(&files, &[".".to_string()])?;
    println!("cargo:rerun-if-changed=quintlet");
    Ok(())
}
