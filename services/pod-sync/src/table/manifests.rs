//! Manifests come before what the API server says: static pods are admitted and started first.

use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use tokio::time::Instant;

use super::Table;
use pod_sync_sources::{SourceKind, Update};

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
            Self::Awaited { until: deadline_after(Instant::now(), READ), api: None }
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

    /// Keeps what the API server says while manifests are awaited, and gives back what is to be handled now.
    fn hold(&mut self, source: SourceKind, update: Update) -> Option<Update> {
        match self {
            Self::Awaited { api, .. } if source == SourceKind::Api => {
                // Each is whole: the newest counts.
                *api = Some(update);
                None
            }
            Self::Awaited { .. } | Self::Read => Some(update),
        }
    }

    /// They were read, or are given up on; what the API server said meanwhile.
    fn read(&mut self) -> Option<Update> {
        match std::mem::replace(self, Self::Read) {
            Self::Awaited { api, .. } => api,
            Self::Read => None,
        }
    }
}

impl Table {
    pub(super) fn receive(&mut self, source: SourceKind, update: Update) {
        let Some(update) = self.manifests.hold(source, update) else { return };
        self.update(source, update);
        if source == SourceKind::File {
            self.manifests_read();
        }
    }

    pub(super) fn manifests_read(&mut self) {
        if let Some(update) = self.manifests.read() {
            self.update(SourceKind::Api, update);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pod_sync_sources::Problem;

    // Told apart by the number of their problems.
    fn update(problems: usize) -> Update {
        let problem = Problem { origin: String::new(), field: String::new(), message: String::new() };
        Update::Problems(vec![problem; problems])
    }

    fn number(update: Option<Update>) -> Option<usize> {
        update.map(|update| match update {
            Update::Problems(problems) => problems.len(),
            Update::Snapshot(_) => 0,
        })
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_word_of_the_api_server_waits_for_the_manifests_and_for_no_others() {
        let mut manifests = Manifests::of(&[SourceKind::Api, SourceKind::File]);
        assert_eq!(number(manifests.hold(SourceKind::Api, update(1))), None);
        assert_eq!(number(manifests.hold(SourceKind::Http, update(2))), Some(2));
        assert_eq!(number(manifests.hold(SourceKind::Api, update(3))), None);
        assert_eq!(number(manifests.hold(SourceKind::File, update(4))), Some(4));
        assert_eq!(number(manifests.read()), Some(3));
        assert_eq!(number(manifests.hold(SourceKind::Api, update(5))), Some(5), "from then on nothing waits");
        assert_eq!(number(manifests.read()), None);

        let mut without = Manifests::of(&[SourceKind::Api]);
        assert_eq!(number(without.hold(SourceKind::Api, update(1))), Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn manifests_that_cannot_be_read_are_given_up_on() {
        let began = Instant::now();
        Manifests::of(&[SourceKind::File]).due().await;
        assert_eq!(began.elapsed(), READ);
    }
}
