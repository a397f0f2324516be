//! Sets the commit of the build: `QUINTLET_COMMIT` if it is set, else the checked-out commit. Links the
//! program to a fixed address, and seldom executed code apart from the rest.

#[path = "build/commit.rs"]
mod commit;

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=QUINTLET_COMMIT");
    let given = std::env::var("QUINTLET_COMMIT").ok().filter(|commit| !commit.is_empty());
    // The workspace's own repository: a source archive may lie within another one.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    let root = manifest.ancestors().nth(2).unwrap_or(Path::new("."));
    let found = commit::find(root);
    for path in &found.depends_on {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let commit = given.or(found.commit).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=QUINTLET_BUILT_FROM={commit}");
    // Relocations at start make tables of addresses private memory of each process. The kubelet has a fixed
    // address, too.
    let is = |key: &str, value: &str| std::env::var(key).is_ok_and(|found| found == value);
    if is("CARGO_CFG_TARGET_OS", "linux") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        println!("cargo::rustc-link-arg-bins=-no-pie");
        // Code that is hardly executed lies apart, so that it is not mapped with the rest.
        println!("cargo::rustc-link-arg-bins=-Wl,-z,keep-text-section-prefix");
    }
}
