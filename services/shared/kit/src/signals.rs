//! Signals that stop a service.

use tokio::signal::unix::{SignalKind, signal};

/// Exit code after a second signal: 128 + SIGINT.
pub(crate) const EXIT_FORCED: i32 = 130;

/// The signal that stopped the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// SIGTERM.
    Term,
    /// SIGINT.
    Interrupt,
}

/// Installs handlers of SIGTERM and SIGINT, which are in place when this function returns. The future
/// completes with the first signal; a second one ends the process at once with code 130.
///
/// Must be called within a Tokio runtime.
///
/// # Errors
/// The handlers cannot be installed.
pub(crate) fn stop_signal() -> std::io::Result<impl Future<Output = StopReason> + use<>> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        // Both streams continue to exist, so a dropped arm does not lose a signal.
        let reason = tokio::select! {
            _ = term.recv() => StopReason::Term,
            _ = int.recv() => StopReason::Interrupt,
        };
        crate::task::spawn("second-signal", async move {
            // The process ends after either.
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
            std::process::exit(EXIT_FORCED);
        });
        reason
    })
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{Signal, raise};

    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_signal_that_arrives_before_the_future_is_polled_is_not_lost() {
        let stopped = stop_signal().unwrap();
        // Ends the test if no handler is installed.
        raise(Signal::SIGTERM).unwrap();
        assert_eq!(stopped.await, StopReason::Term);
    }
}
