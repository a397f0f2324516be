//! Reloads files that change: certificates are rotated while connections are open.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::task;
use tokio_util::sync::CancellationToken;

use crate::auth::review::Reviewer;
use crate::auth::x509::ClientCa;
use crate::tls::ServingCertificate;

/// Interval between checks. File system notifications do not follow the links that certificate managers move.
/// A certificate of a minute's life is rotated six seconds before its end at the latest.
const EVERY: Duration = Duration::from_secs(2);

/// The values that are read from files.
pub(crate) struct ReloadedFiles {
    pub(crate) serving: Arc<ServingCertificate>,
    pub(crate) ca: Option<Arc<ClientCa>>,
    pub(crate) reviewer: Option<Arc<Reviewer>>,
}

impl ReloadedFiles {
    /// Checks for changes until `stop` is cancelled.
    pub(crate) async fn reload_changes(self, stop: CancellationToken) {
        loop {
            // Both arms only wait.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(EVERY) => {}
            }
            let serving = Arc::clone(&self.serving);
            log_result("serving certificate", task::blocking(move || serving.refresh()).await);
            if let Some(ca) = self.ca.clone() {
                log_result("client CA", task::blocking(move || ca.refresh()).await);
            }
            if let Some(reviewer) = &self.reviewer {
                log_result("kubeconfig", reviewer.refresh().await);
            }
        }
    }
}

fn log_result<E: std::error::Error + 'static>(what: &str, read: Result<bool, E>) {
    match read {
        Ok(false) => {}
        Ok(true) => tracing::info!(what, "file reloaded"),
        Err(error) => {
            tracing::warn!(
                what,
                error = quintlet_kit::error_chain(&error),
                "failed to reload file, previous version is kept"
            );
        }
    }
}
