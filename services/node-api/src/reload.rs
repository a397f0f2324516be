//! Files that are read again when they change: certificates are rotated while connections are open.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::auth::review::Reviewer;
use crate::auth::x509::ClientCa;
use crate::tls::Serving;

/// Between two looks. Notifications of the file system do not follow the links that certificate managers move.
const EVERY: Duration = Duration::from_secs(1);

/// What is read from files.
pub(crate) struct Files {
    pub(crate) serving: Arc<Serving>,
    pub(crate) ca: Option<Arc<ClientCa>>,
    pub(crate) reviewer: Option<Arc<Reviewer>>,
}

impl Files {
    /// Looks until stopped.
    pub(crate) async fn keep_fresh(self, stop: CancellationToken) {
        loop {
            // Both only wait.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(EVERY) => {}
            }
            tell("serving certificate", self.serving.refresh());
            if let Some(ca) = &self.ca {
                tell("client CA", ca.refresh());
            }
            if let Some(reviewer) = &self.reviewer {
                tell("kubeconfig", reviewer.refresh().await);
            }
        }
    }
}

fn tell<E: std::error::Error + 'static>(what: &str, read: Result<bool, E>) {
    match read {
        Ok(false) => {}
        Ok(true) => tracing::info!(what, "read again"),
        Err(error) => {
            tracing::warn!(
                what,
                error = quintlet_kit::error_chain(&error),
                "cannot be used; the one before stays"
            );
        }
    }
}
