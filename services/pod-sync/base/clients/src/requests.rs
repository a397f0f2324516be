//! Requests that the API server may refuse because its authorizer does not have the pod yet.

use std::time::Duration;

/// Pauses between attempts. The API server's authorizer and admission follow pods by watches of their own.
/// Just after a pod was created, they may not have it, and refuse a request that refers to it.
pub const LAG: [Duration; 5] = [
    Duration::from_millis(10),
    Duration::from_millis(30),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
];

/// Longest wait for one response.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why a request has no usable response.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The API server refused the request, or could not be reached.
    #[error("{}", text(.0))]
    Failed(#[source] kube::Error),
    /// The API server did not respond in time.
    #[error("the API server did not answer within {}", humantime::format_duration(*.0))]
    Silent(Duration),
}

/// A request was not sent: the node has no identity yet. The task that gets one logs what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoIdentity {
    /// No certificate was issued to the node.
    #[error("the node has no client certificate yet")]
    NoCertificate,
    /// Another machine may have the name of the node.
    #[error("the name of the node is not checked yet")]
    UncheckedName,
}

impl NoIdentity {
    /// Returns the reason if that is why a request failed.
    #[must_use]
    pub fn in_chain(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        std::iter::successors(Some(error), |error| error.source())
            .find_map(|error| error.downcast_ref::<Self>().copied())
    }
}

/// Sends a request, and repeats it as long as the refusal may be due to a lag of the API server. Waits up to
/// `limit` for each response.
///
/// # Errors
/// See [`RequestError`].
pub async fn retry_on_lag<T, F>(limit: Duration, mut ask: impl FnMut() -> F) -> Result<T, RequestError>
where
    F: Future<Output = kube::Result<T>>,
{
    let mut pauses = LAG.into_iter();
    loop {
        match tokio::time::timeout(limit, ask()).await {
            Err(_) => return Err(RequestError::Silent(limit)),
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => match (&error, pauses.next()) {
                (kube::Error::Api(status), Some(pause)) if may_be_lag(status) => {
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(RequestError::Failed(error)),
            },
        }
    }
}

/// Returns whether a refusal may be due to a lag of the API server.
#[must_use]
pub fn may_be_lag(status: &kube::core::Status) -> bool {
    // The storage of the API server calls the kind pods, its NodeRestriction plugin pod.
    let of_pod =
        || status.details.as_ref().is_some_and(|details| matches!(details.kind.as_str(), "pods" | "pod"));
    status.code == 403 || status.code == 404 && of_pod()
}

/// Returns the message of the API server if it responded.
fn text(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => quintlet_kit::error_chain(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn a_pod_that_is_not_found_may_be_one_that_the_server_does_not_know_yet() {
        let not_found = |kind: &str| -> kube::core::Status {
            serde_json::from_value(json!({"status": "Failure", "code": 404, "details": {"kind": kind}}))
                .unwrap()
        };
        assert!(may_be_lag(&not_found("pods")) && may_be_lag(&not_found("pod")));
        assert!(!may_be_lag(&not_found("configmaps")));
    }

    #[test]
    fn a_request_that_was_not_sent_is_recognised_in_the_error_of_its_caller() {
        let unsent = kube::Error::Service(NoIdentity::UncheckedName.into());
        let of_watch = kube::runtime::watcher::Error::InitialListFailed(unsent);
        assert_eq!(NoIdentity::in_chain(&of_watch), Some(NoIdentity::UncheckedName));
        let refused = kube::Error::Service(std::io::Error::other("refused").into());
        assert_eq!(NoIdentity::in_chain(&refused), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_an_answer_is_bounded() {
        let began = Instant::now();
        let answer = retry_on_lag(REQUEST_TIMEOUT, std::future::pending::<kube::Result<()>>).await;
        assert!(matches!(answer, Err(RequestError::Silent(REQUEST_TIMEOUT))), "{answer:?}");
        assert_eq!(began.elapsed(), REQUEST_TIMEOUT);
    }
}
