//! The task that lists and watches one object (`client-go/tools/cache: Reflector`).

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use pod_sync_clients::{LAG, may_be_lag};
use quintlet_kit::backoff::Backoff;
use rand::RngExt as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::item::Item;
use super::reachability::{RETRY, Reachability};
use crate::get::trimmed;
use crate::kind::{Key, Kind};

/// Called after each change of an object, at most every [`NOTIFY_INTERVAL`].
pub(crate) type Changed = Arc<dyn Fn(&Key) + Send + Sync>;

/// Back-off after failed requests (`client-go/tools/cache: NewReflectorWithOptions`), with jitter up to as
/// much again.
const BACKOFF: Duration = Duration::from_millis(800);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Longest wait for the response to a list, and for the beginning of the response to a watch.
const RESPONSE: Duration = Duration::from_secs(60);
/// Time after which the API server ends a watch, in seconds, plus as much chance as [`WATCH_JITTER`]. Below
/// 295, the maximum of the client.
const WATCH_SECONDS: u32 = 230;
const WATCH_JITTER: u32 = 60;
/// A watch that ends sooner and without an event has failed.
const SHORT_WATCH: Duration = Duration::from_secs(1);
/// Shortest interval between two notifications. An object that is written in a loop makes its pods read it
/// ten times a second.
pub(super) const NOTIFY_INTERVAL: Duration = Duration::from_millis(100);
/// Largest delay of the watches that go on when the API server has returned, so that they do not go on all at
/// once.
const RETURN_JITTER: Duration = Duration::from_millis(200);

/// Reason why a list or watch ended.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("request failed")]
    Request(#[source] kube::Error),
    #[error("the API server did not answer within {}", humantime::format_duration(RESPONSE))]
    Silent,
    #[error("the API server ended the watch: {0}")]
    Ended(String),
    #[error("the watch ended at once and without an event")]
    Short,
}

impl Failure {
    /// Returns whether the API server did not respond, or could not.
    fn is_unreachable(&self) -> bool {
        match self {
            Self::Request(kube::Error::Api(status)) => status.code >= 500 || status.code == 429,
            Self::Request(_) | Self::Silent => true,
            Self::Ended(_) | Self::Short => false,
        }
    }

    fn is_expired(&self) -> bool {
        matches!(self, Self::Request(kube::Error::Api(status)) if status.code == 410)
    }

    fn may_be_lag(&self) -> bool {
        matches!(self, Self::Request(kube::Error::Api(status)) if may_be_lag(status))
    }
}

/// How a watch ended.
enum End {
    /// The API server closed it, as it does after a while.
    Closed,
    /// The resource version of the watch is too old.
    Expired,
    Failed(Failure),
}

/// Lists and watches one object, stores each version in its [`Item`], and reports changes.
pub(super) struct Reflector<K> {
    api: Api<K>,
    item: Arc<Item<K>>,
    run: CancellationToken,
    changed: Changed,
    reachability: Arc<Reachability>,
    backoff: Backoff,
    // Pauses before the first list that are shorter than the back-off.
    lag: std::array::IntoIter<Duration, 5>,
    is_failing: bool,
    notified: Option<Instant>,
    // When a change is reported that came too soon after the one before.
    report_at: Option<Instant>,
}

impl<K: Kind> Reflector<K> {
    pub(super) fn new(
        api: Api<K>,
        item: Arc<Item<K>>,
        run: CancellationToken,
        changed: Changed,
        reachability: Arc<Reachability>,
    ) -> Self {
        Self {
            api,
            item,
            run,
            changed,
            reachability,
            backoff: Backoff::new(BACKOFF, 2.0, BACKOFF_MAX),
            lag: LAG.into_iter(),
            is_failing: false,
            notified: None,
            report_at: None,
        }
    }

    /// Runs until the token is cancelled.
    pub(super) async fn run(mut self) {
        let run = self.run.clone();
        // The item takes nothing from a watch whose token is cancelled, so a dropped request has no effect.
        tokio::select! {
            () = run.cancelled() => {}
            () = self.list_and_watch() => {}
        }
        self.report_pending();
    }

    async fn list_and_watch(&mut self) {
        loop {
            match self.list().await {
                Ok(version) => self.watch(version).await,
                Err(failure) => self.wait_after(&failure).await,
            }
        }
    }

    fn selector(&self) -> String {
        format!("metadata.name={}", self.item.key.name)
    }

    fn is_named(&self, object: &K) -> bool {
        object.meta().name.as_deref() == Some(self.item.key.name.as_str())
    }

    // The list is consistent: without a version, it is never older than what was watched before.
    async fn list(&mut self) -> Result<String, Failure> {
        let params = ListParams::default().fields(&self.selector());
        let list = match tokio::time::timeout(RESPONSE, self.api.list(&params)).await {
            Ok(list) => list.map_err(Failure::Request)?,
            Err(_) => return Err(Failure::Silent),
        };
        self.reachability.responded();
        let object = list.items.into_iter().find(|object| self.is_named(object));
        self.apply(object);
        Ok(list.metadata.resource_version.unwrap_or_default())
    }

    /// Watches from a version on. Returns when the object has to be listed again.
    async fn watch(&mut self, mut version: String) {
        let mut is_fresh = true;
        loop {
            let began = Instant::now();
            let before = version.clone();
            let end = self.one_watch(&mut version).await;
            self.report_pending();
            let is_short = began.elapsed() < SHORT_WATCH && version == before;
            if !is_short {
                self.is_failing = false;
                self.backoff.reset();
            }
            match end {
                End::Closed if is_short => self.wait_after(&Failure::Short).await,
                End::Closed => {}
                End::Expired => {
                    if is_short && is_fresh {
                        // The version of the list before is too old already.
                        self.wait_after(&Failure::Short).await;
                    }
                    return;
                }
                End::Failed(failure) => self.wait_after(&failure).await,
            }
            is_fresh = false;
        }
    }

    async fn one_watch(&mut self, version: &mut String) -> End {
        let seconds = WATCH_SECONDS.saturating_add(rand::rng().random_range(0..WATCH_JITTER));
        let params = WatchParams::default().fields(&self.selector()).timeout(seconds);
        let api = self.api.clone();
        let stream = match tokio::time::timeout(RESPONSE, api.watch(&params, version)).await {
            Err(_) => return End::Failed(Failure::Silent),
            Ok(Err(error)) => {
                let failure = Failure::Request(error);
                return if failure.is_expired() { End::Expired } else { End::Failed(failure) };
            }
            Ok(Ok(stream)) => stream,
        };
        self.reachability.responded();
        futures::pin_mut!(stream);
        loop {
            let report_at = self.report_at;
            let due = async {
                match report_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            // The stream keeps its position if this arm is dropped, and the time of the report stays.
            let event = tokio::select! {
                event = stream.next() => event,
                () = due => {
                    self.report_pending();
                    continue;
                }
            };
            match event {
                None => return End::Closed,
                Some(Err(error)) => return End::Failed(Failure::Request(error)),
                Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                    take_version(version, &object);
                    if self.is_named(&object) {
                        self.apply(Some(object));
                    }
                }
                Some(Ok(WatchEvent::Deleted(object))) => {
                    take_version(version, &object);
                    if self.is_named(&object) {
                        self.apply(None);
                    }
                }
                Some(Ok(WatchEvent::Bookmark(bookmark))) => {
                    version.clone_from(&bookmark.metadata.resource_version);
                }
                Some(Ok(WatchEvent::Error(status))) if status.code == 410 => return End::Expired,
                Some(Ok(WatchEvent::Error(status))) => {
                    return End::Failed(Failure::Ended(status.message.clone()));
                }
            }
        }
    }

    fn apply(&mut self, object: Option<K>) {
        if !self.item.apply(&self.run, object.map(trimmed)) {
            return;
        }
        let now = Instant::now();
        match self.notified.map(|at| quintlet_kit::clock::deadline_after(at, NOTIFY_INTERVAL)) {
            Some(next) if now < next => self.report_at = Some(next),
            Some(_) | None => self.report(now),
        }
    }

    fn report(&mut self, now: Instant) {
        self.notified = Some(now);
        self.report_at = None;
        (self.changed)(&self.item.key);
    }

    fn report_pending(&mut self) {
        if self.report_at.is_some() {
            self.report(Instant::now());
        }
    }

    async fn wait_after(&mut self, failure: &Failure) {
        if failure.may_be_lag()
            && let Some(pause) = self.lag.next()
        {
            tokio::time::sleep(pause).await;
            return;
        }
        self.log(failure);
        let jitter = |wait: Duration| wait.saturating_add(wait.mul_f64(rand::rng().random_range(0.0..1.0)));
        let wait = jitter(self.backoff.next_wait());
        if !failure.is_unreachable() {
            tokio::time::sleep(wait).await;
            return;
        }
        // A return after this point ends the wait.
        let mut returns = self.reachability.returns();
        self.reachability.lost();
        let attempt = self.reachability.attempt();
        let wait = if attempt.is_some() { wait.min(RETRY) } else { wait };
        // Both arms only wait.
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = returns.changed() => {
                let chance = rand::rng().random_range(0.0..1.0);
                tokio::time::sleep(RETURN_JITTER.mul_f64(chance)).await;
            }
        }
    }

    // One line when a watch begins to fail: the API server may be away for hours, and pods refer to many
    // objects.
    fn log(&mut self, failure: &Failure) {
        let kind = K::kind(&());
        let namespace = self.item.key.namespace.as_str();
        let name = self.item.key.name.as_str();
        let error = quintlet_kit::error_chain(failure);
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::info!(%kind, namespace, name, error, "object watch failed, retrying");
        } else {
            tracing::debug!(%kind, namespace, name, error, "object watch failed again, retrying");
        }
    }
}

fn take_version<K: Kind>(version: &mut String, object: &K) {
    if let Some(new) = &object.meta().resource_version {
        version.clone_from(new);
    }
}
