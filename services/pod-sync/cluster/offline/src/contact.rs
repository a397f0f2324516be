//! Whether the API server answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pod_sync_clients::NoIdentity;
use quintlet_kit::clock::deadline_after;
use tokio::sync::watch;
use tokio::time::Instant;

/// A request that is given up after this time without a response counts as one without an answer. A shorter
/// one may be given up because its pod has changed.
const SILENT: Duration = Duration::from_secs(5);

/// The kind of reply to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// The API server responded. A refusal such as 401, 403, 404 or 429 is an answer.
    Answer,
    /// There was no response, or a proxy or the API server itself had an internal error (5xx).
    NoAnswer,
    /// The request was not sent.
    Unsent,
}

impl Reply {
    fn of_status(code: u16) -> Self {
        if code < 500 { Self::Answer } else { Self::NoAnswer }
    }

    /// Returns what an error says.
    #[must_use]
    pub fn of_error(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status.code),
            other if NoIdentity::in_chain(other).is_some() => Self::Unsent,
            _ => Self::NoAnswer,
        }
    }

    /// Returns what the result of a request says.
    #[must_use]
    pub fn of<T>(result: &Result<T, kube::Error>) -> Self {
        result.as_ref().map_or_else(Self::of_error, |_| Self::Answer)
    }
}

/// Since when the API server gives no answer; none after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Silence(Option<Instant>);

impl Silence {
    /// Returns the state after a reply, and whether the API server has returned with it.
    fn after(self, reply: Reply, now: Instant, wait: Duration) -> (Self, bool) {
        match reply {
            Reply::Answer => (Self(None), self.is_away(now, wait)),
            Reply::NoAnswer => (Self(Some(self.0.unwrap_or(now))), false),
            Reply::Unsent => (self, false),
        }
    }

    fn away_at(self, wait: Duration) -> Option<Instant> {
        self.0.map(|since| deadline_after(since, wait))
    }

    fn is_away(self, now: Instant, wait: Duration) -> bool {
        self.away_at(wait).is_some_and(|at| now >= at)
    }
}

/// Whether the API server is away: there was no answer for a time, which begins with the start of the
/// process or with the first request without an answer.
#[derive(Debug)]
pub struct Contact {
    silence: watch::Sender<Silence>,
    wait: Duration,
    returns: AtomicU64,
}

impl Contact {
    /// Returns the contact of a process that has just started. `wait` is the time without an answer after
    /// which the API server is away.
    #[must_use]
    pub fn new(wait: Duration) -> Self {
        Self { silence: watch::Sender::new(Silence(Some(Instant::now()))), wait, returns: AtomicU64::new(0) }
    }

    /// Records what a request says.
    pub fn record(&self, reply: Reply) {
        let now = Instant::now();
        self.silence.send_if_modified(|silence| {
            let (after, has_returned) = silence.after(reply, now, self.wait);
            if has_returned {
                self.returns.fetch_add(1, Ordering::Relaxed);
            }
            std::mem::replace(silence, after) != after
        });
    }

    /// Returns whether the API server is away.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.silence.borrow().is_away(Instant::now(), self.wait)
    }

    /// Returns how often the API server has returned after it was away.
    pub(crate) fn returns(&self) -> u64 {
        self.returns.load(Ordering::Relaxed)
    }

    /// Waits until the API server is away. Cancellation safety: a dropped wait has no effect.
    pub async fn away(&self) {
        let mut changes = self.silence.subscribe();
        loop {
            let due = changes.borrow_and_update().away_at(self.wait);
            let passed = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            // Both arms only wait.
            tokio::select! {
                () = passed => return,
                changed = changes.changed() => if changed.is_err() { return std::future::pending().await },
            }
        }
    }

    /// Returns a client that records the answers to its requests.
    #[must_use]
    pub fn observing(self: &Arc<Self>, client: &kube::Client) -> kube::Client {
        let (contact, client) = (Arc::clone(self), client.clone());
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (contact, client) = (Arc::clone(&contact), client.clone());
            async move {
                let mut pending = Pending { contact, began: Instant::now(), is_over: false };
                let response = client.send(request).await;
                pending.is_over = true;
                pending.contact.record(match &response {
                    Ok(response) => Reply::of_status(response.status().as_u16()),
                    Err(error) => Reply::of_error(error),
                });
                response
            }
        });
        kube::Client::new(service, "default")
    }
}

/// A request without a response. It counts when it is given up.
struct Pending {
    contact: Arc<Contact>,
    began: Instant,
    is_over: bool,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.is_over && self.began.elapsed() >= SILENT {
            self.contact.record(Reply::NoAnswer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_secs(20);

    fn api_error(code: u16) -> kube::Error {
        let status = serde_json::json!({"status": "Failure", "code": code});
        kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
    }

    #[test]
    fn a_refusal_is_an_answer_and_an_internal_error_is_none() {
        for (code, want) in [
            (400, Reply::Answer),
            (401, Reply::Answer),
            (403, Reply::Answer),
            (404, Reply::Answer),
            (429, Reply::Answer),
            (500, Reply::NoAnswer),
            (503, Reply::NoAnswer),
        ] {
            assert_eq!(Reply::of_error(&api_error(code)), want, "{code}");
        }
        let unsent = kube::Error::Service(NoIdentity::UncheckedName.into());
        assert_eq!(Reply::of_error(&unsent), Reply::Unsent);
        let refused = kube::Error::Service(std::io::Error::other("refused").into());
        assert_eq!(Reply::of_error(&refused), Reply::NoAnswer);
    }

    #[tokio::test(start_paused = true)]
    async fn the_server_is_away_after_the_wait_without_an_answer_and_back_with_any() {
        let contact = Contact::new(WAIT);
        assert!(!contact.is_away());
        tokio::time::advance(WAIT).await;
        assert!(contact.is_away(), "nothing was asked, and nothing has answered");
        contact.record(Reply::Unsent);
        assert!(contact.is_away());
        contact.record(Reply::Answer);
        assert_eq!((contact.is_away(), contact.returns()), (false, 1));
        tokio::time::advance(WAIT * 10).await;
        assert!(!contact.is_away(), "no request has failed");
        contact.record(Reply::NoAnswer);
        tokio::time::advance(WAIT / 2).await;
        contact.record(Reply::NoAnswer);
        assert!(!contact.is_away());
        tokio::time::advance(WAIT / 2).await;
        assert!(contact.is_away(), "the first failure counts");
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_when_the_server_is_away_and_begins_again_with_each_answer() {
        let contact = Contact::new(WAIT);
        tokio::time::advance(WAIT / 2).await;
        contact.record(Reply::Answer);
        assert!(tokio::time::timeout(WAIT * 2, contact.away()).await.is_err());
        contact.record(Reply::NoAnswer);
        let began = Instant::now();
        contact.away().await;
        assert_eq!(began.elapsed(), WAIT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_given_up_counts_if_it_has_waited_for_long() {
        let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, kube::Error>>()
        });
        let contact = Arc::new(Contact::new(WAIT));
        let client = contact.observing(&kube::Client::new(silent, "default"));
        for (waited, counts) in [(SILENT / 2, false), (SILENT, true)] {
            contact.record(Reply::Answer);
            let request = http::Request::get("/api").body(kube::client::Body::empty()).unwrap();
            assert!(tokio::time::timeout(waited, client.send(request)).await.is_err());
            tokio::time::advance(WAIT).await;
            assert_eq!(contact.is_away(), counts, "{waited:?}");
        }
    }
}
