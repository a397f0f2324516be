//! Paths of the built binaries.

use std::path::{Path, PathBuf};

/// Environment variable with the directory of the binaries. The default is that of the test's own build.
pub const BIN_DIR_ENV: &str = "QUINTLET_BIN_DIR";

/// The services of every node, in start order.
pub const SERVICES: [&str; 5] = ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync"];

/// Returns the directory with the binaries of all services and of quintctl.
///
/// # Panics
/// A binary is missing.
#[must_use]
pub fn dir() -> PathBuf {
    let dir = std::env::var_os(BIN_DIR_ENV).map_or_else(profile_dir, PathBuf::from);
    for name in SERVICES.into_iter().chain(["node-api", "quintctl"]) {
        let path = dir.join(name);
        assert!(
            path.is_file(),
            "{} is missing: run `make test`, or build the services and name their directory in {BIN_DIR_ENV}",
            path.display()
        );
    }
    dir
}

/// Returns `target/<profile>`: the test's executable is in its `deps`.
pub(crate) fn profile_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("a running process has an executable");
    let parent = exe.parent().unwrap_or(Path::new("."));
    if parent.ends_with("deps") { parent.parent().unwrap_or(parent).to_owned() } else { parent.to_owned() }
}

/// Returns promtool, from where `scripts/install.sh test` unpacks it.
///
/// # Panics
/// It does not exist.
#[must_use]
pub fn promtool() -> PathBuf {
    unpacked("prometheus/usr/bin/promtool")
}

/// Returns Debian's kubectl 1.20, which speaks SPDY only, from where `scripts/install.sh test` unpacks it.
///
/// # Panics
/// It does not exist.
#[must_use]
pub fn kubectl() -> PathBuf {
    unpacked("kubernetes-client/usr/bin/kubectl")
}

/// Returns the directory of the Python modules of gRPC, where `scripts/install.sh test` installs them.
///
/// # Panics
/// It does not exist.
#[must_use]
pub fn grpcio() -> PathBuf {
    unpacked("grpcio/grpc/__init__.py").ancestors().nth(2).map(Path::to_owned).unwrap_or_default()
}

/// Returns the program of a cargo example, which each build of the workspace makes.
///
/// # Panics
/// It does not exist.
#[must_use]
pub fn example(name: &str) -> PathBuf {
    let path = profile_dir().join("examples").join(name);
    assert!(path.is_file(), "{} is missing: run cargo build --workspace --all-targets", path.display());
    path
}

fn unpacked(tool: &str) -> PathBuf {
    let target = profile_dir().parent().map(Path::to_owned).unwrap_or_default();
    let path = target.join("tools").join(tool);
    assert!(path.is_file(), "{} is missing: run scripts/install.sh test", path.display());
    path
}
