//! The output of commands of `/run`, which the kubelet returns as a whole.
//!
//! The runtime limits an output to 16 MiB, and a client may read as slowly as its connection allows. All
//! outputs that wait for their clients share a limit.

use axum::body::{Body, Bytes};
use futures::StreamExt as _;
use http::{HeaderValue, StatusCode, header};
use quintlet_cri_api::v1::ExecSyncResponse;
use tokio::sync::Semaphore;

use node_api_base::answer::{self, Answer};

/// Bytes of outputs that wait for their clients: three of the largest, as in cri-proxy.
const WAITING: usize = 48 << 20;

/// Seconds after which a client tries again, as after another command that the node has no room for.
const RETRY_AFTER: &str = "60";

static ROOM: Semaphore = Semaphore::const_new(WAITING);

/// Returns the response to a command that has exited: its output, then what it wrote to stderr. A failure
/// begins with a text about the command.
pub(crate) fn response(command: &str, reply: ExecSyncResponse) -> Answer {
    response_within(&ROOM, command, reply)
}

fn response_within(room: &'static Semaphore, command: &str, reply: ExecSyncResponse) -> Answer {
    let bytes = reply.stdout.len().saturating_add(reply.stderr.len());
    let Some(held) = u32::try_from(bytes).ok().and_then(|bytes| room.try_acquire_many(bytes).ok()) else {
        let message = "too many outputs of commands wait for their clients";
        let mut refusal = answer::text(StatusCode::TOO_MANY_REQUESTS, message);
        refusal.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        return refusal;
    };
    let failure = match reply.exit_code {
        0 => String::new(),
        code => format!("command '{command}' exited with {code}: "),
    };
    let is_failure = !failure.is_empty();
    let parts =
        [failure.into_bytes(), reply.stdout, reply.stderr].into_iter().filter(|part| !part.is_empty());
    let parts = futures::stream::iter(parts.collect::<Vec<_>>()).map(move |part| {
        // The room is free again when the body has been sent or dropped.
        let _held = &held;
        Ok::<_, std::convert::Infallible>(Bytes::from(part))
    });
    let body = Body::from_stream(parts);
    if is_failure {
        answer::with_type(StatusCode::INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", body)
    } else {
        answer::json(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(stdout: usize, stderr: usize) -> ExecSyncResponse {
        ExecSyncResponse { stdout: vec![b'o'; stdout], stderr: vec![b'e'; stderr], exit_code: 0 }
    }

    #[tokio::test]
    async fn outputs_that_wait_for_their_clients_have_a_limit() {
        static SMALL: Semaphore = Semaphore::const_new(10);
        let first = response_within(&SMALL, "c", reply(4, 2));
        assert_eq!(first.status(), StatusCode::OK);
        let refused = response_within(&SMALL, "c", reply(5, 0));
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(refused.headers()[header::RETRY_AFTER], RETRY_AFTER);
        let second = response_within(&SMALL, "c", reply(0, 4));
        assert_eq!((second.status(), SMALL.available_permits()), (StatusCode::OK, 0));
        let body = axum::body::to_bytes(first.into_body(), 100).await.unwrap();
        assert_eq!((&body[..], SMALL.available_permits()), (&b"ooooee"[..], 6));
        drop(second);
        assert_eq!(SMALL.available_permits(), 10);
        let empty = response_within(&SMALL, "c", reply(0, 0));
        assert!(axum::body::to_bytes(empty.into_body(), 100).await.unwrap().is_empty());
        let failed = response_within(&SMALL, "c", ExecSyncResponse { exit_code: 3, ..reply(1, 1) });
        assert_eq!(failed.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = axum::body::to_bytes(failed.into_body(), 100).await.unwrap();
        assert_eq!(&body[..], b"command 'c' exited with 3: oe");
    }
}
