//! The csi-node-driver-registrar of the CSI project, which registers the tests' driver with a kubelet. The
//! driver cannot do so itself: the kubelet's client names the path of the socket as the authority of its
//! requests, which hyper refuses.

use std::path::Path;
use std::process::{Child, Command};

use quintlet_csi_driver::thread::DriverThread;

/// A running registrar. Dropping it kills it.
#[derive(Debug)]
pub struct Registrar(Child);

impl Drop for Registrar {
    fn drop(&mut self) {
        // Killing a process that has exited fails.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a driver for a root directory, with its state in `state`, and the program `registrar`, which
/// registers it.
///
/// # Errors
/// The program cannot be started.
pub fn start(
    registrar: &Path,
    root: &Path,
    state: &Path,
    name: &str,
) -> std::io::Result<(DriverThread, Registrar)> {
    let socket = root.join("plugins").join(name).join("csi.sock").display().to_string();
    let more = ["--name", name, "--endpoint", &socket];
    // The registration of the driver itself is where no agent looks for it.
    let thread = DriverThread::start(&state.join("unused"), state, &more);
    let child = Command::new(registrar)
        .args(["--csi-address", &socket, "--kubelet-registration-path", &socket])
        .arg("--plugin-registration-path")
        .arg(root.join("plugins_registry"))
        .stderr(std::fs::File::create(state.join("registrar.log"))?)
        .spawn()?;
    Ok((thread, Registrar(child)))
}
