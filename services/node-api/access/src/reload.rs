//! Reloads files that change: certificates are rotated while connections are open.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::task;
use quintlet_kit::timers::FileChecks;
use tokio_util::sync::CancellationToken;

use crate::review::Reviewer;
use crate::tls::ServingCertificate;
use crate::x509::ClientCa;

/// Longest wait between checks. File system notifications do not follow the links that certificate managers
/// move.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// The values that are read from files.
pub struct ReloadedFiles {
    /// The serving certificate and its key.
    pub serving: Arc<ServingCertificate>,
    /// Trust anchors of client certificates; `None` if clients have no certificates.
    pub ca: Option<Arc<ClientCa>>,
    /// Client of the API server for reviews; `None` if nothing is reviewed.
    pub reviewer: Option<Arc<Reviewer>>,
}

impl ReloadedFiles {
    /// Checks for changes until `stop` is cancelled.
    pub async fn reload_changes(self, stop: CancellationToken) {
        let mut checks = FileChecks::new(LONGEST_WAIT);
        loop {
            // Both arms only wait.
            tokio::select! {
                () = stop.cancelled() => return,
                () = checks.pause() => {}
            }
            let serving = Arc::clone(&self.serving);
            let mut has_changed =
                log_result("serving certificate", task::blocking(move || serving.refresh()).await);
            if let Some(ca) = self.ca.clone() {
                has_changed |= log_result("client CA", task::blocking(move || ca.refresh()).await);
            }
            if let Some(reviewer) = &self.reviewer {
                has_changed |= log_result("kubeconfig", reviewer.refresh().await);
            }
            if has_changed {
                checks.reset();
            }
        }
    }
}

fn log_result<E: std::error::Error + 'static>(what: &str, read: Result<bool, E>) -> bool {
    match &read {
        Ok(false) => {}
        Ok(true) => tracing::info!(what, "file reloaded"),
        Err(error) => {
            tracing::warn!(
                what,
                error = quintlet_kit::error_chain(error),
                "failed to reload file, previous version is kept"
            );
        }
    }
    !matches!(read, Ok(false))
}
