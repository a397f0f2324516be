//! Tasks and boottime.
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// Spawns a named task.
#[expect(clippy::disallowed_methods, reason = "the one place")]
pub fn spawn<T: Send + 'static>(
    _name: &'static str,
    task: impl Future<Output = T> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    tokio::spawn(task)
}

/// CLOCK_BOOTTIME since boot.
pub type BootClock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// The machine's.
pub fn boot_clock() -> BootClock {
    Arc::new(|| {
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
    })
}

/// Binds a socket in a directory of its own, over one that was left behind.
pub fn bind(path: &std::path::Path) -> std::io::Result<tokio::net::UnixListener> {
    use std::os::unix::fs::PermissionsExt as _;
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let listener = tokio::net::UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}
