//! Compiles the contracts, and gives each generated client and server the limits of `src/limits.rs`.
use std::path::{Path, PathBuf};

/// The contract whose clients are not part of Quintlet.
const SUBSCRIBE: &str = "subscribe";

/// Returns texts that tonic generates, each with its replacement. Each client has the first text once, each
/// server the others once.
fn limits(area: &str) -> [(&'static str, &'static str); 3] {
    let request = if area == SUBSCRIBE {
        "max_decoding_message_size: Some(crate::limits::SUBSCRIBE_REQUEST)"
    } else {
        "max_decoding_message_size: Some(crate::limits::REQUEST)"
    };
    [
        ("tonic::client::Grpc::new(inner)", "crate::limits::client(tonic::client::Grpc::new(inner))"),
        ("max_decoding_message_size: None", request),
        ("max_encoding_message_size: None", "max_encoding_message_size: Some(crate::limits::ANSWER)"),
    ]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let areas = ["common", "runtime", "pleg", "probe", "status", "podsync", SUBSCRIBE, "debug"];
    let files: Vec<String> = areas.iter().map(|a| format!("quintlet/{a}/v1/{a}.proto")).collect();
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    tonic_prost_build::configure()
        .file_descriptor_set_path(out.join("quintlet.bin"))
        .compile_protos(&files, &[".".to_string()])?;
    for area in areas {
        limit(&out.join(format!("quintlet.{area}.v1.rs")), &limits(area))?;
    }
    println!("cargo:rerun-if-changed=quintlet");
    println!("cargo:rerun-if-changed=build.rs");
    Ok(())
}

/// Sets the limits of the clients and servers in a generated file.
fn limit(file: &Path, limits: &[(&str, &str)]) -> Result<(), Box<dyn std::error::Error>> {
    let mut code = std::fs::read_to_string(file)?;
    let services = code.matches("pub trait ").count();
    for (generated, limited) in limits {
        let found = code.matches(generated).count();
        if found != services {
            return Err(
                format!("{}: {services} services, {found} times {generated:?}", file.display()).into()
            );
        }
        code = code.replace(generated, limited);
    }
    std::fs::write(file, code)?;
    Ok(())
}
