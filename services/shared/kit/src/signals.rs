//! Signals that stop a service.

use tokio::signal::unix::{SignalKind, signal};

/// Exit code after a second signal: 128 + SIGINT.
pub const EXIT_FORCED: i32 = 130;

/// The signal that stopped the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// SIGTERM.
    Term,
    /// SIGINT.
    Interrupt,
}

/// Waits for SIGTERM or SIGINT. A second one ends the process at once with code 130.
pub async fn stop_signal() -> StopReason {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        // Without handlers the default action ends the process.
        return std::future::pending().await;
    };
    // Both streams continue to exist, so a dropped arm does not lose a signal.
    let reason = tokio::select! {
        _ = term.recv() => StopReason::Term,
        _ = int.recv() => StopReason::Interrupt,
    };
    crate::task::spawn("second-signal", async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        std::process::exit(EXIT_FORCED);
    });
    reason
}
