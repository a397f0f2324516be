//! Manifests come before what the API server says: static pods are admitted and started first.

use std::time::Duration;

use tokio::time::Instant;

use super::Table;
use crate::source::{SourceKind, Update};

/// How long the API server's pods wait for manifests to be read: a directory that hangs must not keep them.
const READ: Duration = Duration::from_secs(2);

/// Whether the manifests were read.
#[derive(Debug)]
pub(super) enum Manifests {
    /// They are to be; what the API server said meanwhile waits, at most until then.
    Awaited { until: Instant, api: Option<Update> },
    /// They were, or are not waited for.
    Read,
}

impl Manifests {
    pub(super) fn of(sources: &[SourceKind]) -> Self {
        if sources.contains(&SourceKind::File) {
            Self::Awaited { until: Instant::now() + READ, api: None }
        } else {
            Self::Read
        }
    }

    /// Ends when they are not waited for any more.
    pub(super) fn due(&self) -> impl Future<Output = ()> + use<> {
        let until = match self {
            Self::Awaited { until, .. } => Some(*until),
            Self::Read => None,
        };
        async move {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        }
    }
}

impl Table {
    pub(super) fn receive(&mut self, source: SourceKind, update: Update) {
        if source == SourceKind::Api
            && let Manifests::Awaited { api, .. } = &mut self.manifests
        {
            // Each is whole: the newest counts.
            *api = Some(update);
            return;
        }
        self.update(source, update);
        if source == SourceKind::File {
            self.manifests_read();
        }
    }

    pub(super) fn manifests_read(&mut self) {
        if let Manifests::Awaited { api: Some(update), .. } =
            std::mem::replace(&mut self.manifests, Manifests::Read)
        {
            self.update(SourceKind::Api, update);
        }
    }
}
