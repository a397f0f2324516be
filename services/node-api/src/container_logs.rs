//! `/containerLogs/{namespace}/{pod}/{container}`.
//!
//! cri-proxy reads the log file (`ContainerLogs` on its socket `node-api`), because log files belong to root.
//! This process decodes its lines. It reads from cri-proxy only as fast as the client reads: a slow client
//! holds four blocks, not the log.

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use node_api_base::answer::{Answer, text, with_type};
use node_api_base::pod_lookup::{self, Instance};
use node_api_base::services::{Services, record_error};
use quintlet_crilog::{Decoder, Flow, Options, Stream};
use quintlet_proto::runtime::v1::container_logs_client::ContainerLogsClient;
use quintlet_proto::runtime::v1::{LogChunk, ReadLogRequest};
use serde_json::Value;
use tonic::Streaming;

use crate::counters::Counters;

/// The parameters of a request (`PodLogOptions`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Query {
    follow: bool,
    previous: bool,
    timestamps: bool,
    since_seconds: Option<i64>,
    since_time: Option<jiff::Timestamp>,
    tail_lines: Option<i64>,
    limit_bytes: Option<i64>,
    stream: Option<String>,
}

/// Reason why a query is rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BadQuery {
    /// A value cannot be parsed.
    Undecodable,
    /// A value is out of range, or values contradict each other.
    Invalid,
    /// The selection of a stream is disabled.
    Stream(String),
}

impl BadQuery {
    fn answer(&self) -> Answer {
        match self {
            Self::Undecodable => message(StatusCode::BAD_REQUEST, "Unable to decode query."),
            Self::Invalid => message(StatusCode::UNPROCESSABLE_ENTITY, "Invalid request."),
            Self::Stream(name) => text(
                StatusCode::BAD_REQUEST,
                format!(
                    "unable to return the given log stream: {name:?}. Please enable PodLogsQuerySplitStreams \
                     feature gate in kubelet"
                ),
            ),
        }
    }
}

/// Returns a message in the JSON form of the kubelet.
fn message(code: StatusCode, text: &str) -> Answer {
    with_type(code, "application/json", format!("{{\"message\": \"{text}\"}}"))
}

impl Query {
    /// Parses a query as the API machinery parses `PodLogOptions`.
    ///
    /// # Errors
    /// Fails if a value cannot be parsed or is invalid.
    pub(crate) fn parse(pairs: &[(String, String)], split_streams: bool) -> Result<Self, BadQuery> {
        let get = |name: &str| pairs.iter().find(|(k, _)| k == name).map(|(_, v)| v.as_str());
        let flag = |name: &str| get(name).is_some_and(|v| !v.eq_ignore_ascii_case("false") && v != "0");
        let number = |name: &str| match get(name) {
            None | Some("") => Ok(None),
            Some(v) => v.parse::<i64>().map(Some).map_err(|_| BadQuery::Undecodable),
        };
        let since_time = match get("sinceTime") {
            None | Some("") => None,
            Some(v) => Some(v.parse().map_err(|_| BadQuery::Undecodable)?),
        };
        let tail_lines = match get("tail") {
            Some("all") => None,
            Some(_) => number("tail")?,
            None => number("tailLines")?,
        };
        let query = Self {
            follow: flag("follow"),
            previous: flag("previous"),
            timestamps: flag("timestamps"),
            since_seconds: number("sinceSeconds")?,
            since_time,
            tail_lines,
            limit_bytes: number("limitBytes")?,
            stream: get("stream").filter(|s| !s.is_empty()).map(str::to_owned),
        };
        query.check(split_streams)
    }

    fn check(self, split_streams: bool) -> Result<Self, BadQuery> {
        let fits = self.tail_lines.is_none_or(|n| n >= 0)
            && self.limit_bytes.is_none_or(|n| n >= 1)
            && self.since_seconds.is_none_or(|n| n >= 1)
            && !(self.since_seconds.is_some() && self.since_time.is_some());
        let one = self.stream.as_deref().filter(|s| *s != "All");
        match one {
            _ if !fits => Err(BadQuery::Invalid),
            Some(name) if !split_streams => Err(BadQuery::Stream(name.to_owned())),
            // The last lines of one stream cannot be found from the last lines of the file.
            Some("Stdout" | "Stderr") if self.tail_lines.is_none() => Ok(self),
            Some(_) => Err(BadQuery::Invalid),
            None => Ok(self),
        }
    }

    fn options(&self, now: jiff::Timestamp) -> Options {
        let since = |seconds| now.checked_sub(jiff::SignedDuration::from_secs(seconds)).ok();
        Options {
            timestamps: self.timestamps,
            since: self.since_time.or_else(|| self.since_seconds.and_then(since)),
            limit_bytes: self.limit_bytes.and_then(|n| u64::try_from(n).ok()),
            stream: match self.stream.as_deref() {
                Some("Stdout") => Some(Stream::Stdout),
                Some("Stderr") => Some(Stream::Stderr),
                _ => None,
            },
        }
    }
}

/// Responds with the log of a container.
pub(crate) async fn logs(
    node: &Services,
    counters: &Counters,
    segments: &[String],
    query: &[(String, String)],
    split_streams: bool,
    now: jiff::Timestamp,
) -> Answer {
    let part = |i: usize| segments.get(i).map(String::as_str).filter(|s| !s.is_empty());
    let Some(namespace) = part(0) else { return message(StatusCode::BAD_REQUEST, "Missing podNamespace.") };
    let Some(name) = part(1) else { return message(StatusCode::BAD_REQUEST, "Missing podID.") };
    let Some(container) = part(2) else {
        return message(StatusCode::BAD_REQUEST, "Missing container name.");
    };
    if segments.len() > 3 {
        return node_api_base::answer::not_found();
    }
    let query = match Query::parse(query, split_streams) {
        Ok(query) => query,
        Err(bad) => return bad.answer(),
    };
    let pod = match node.pod(namespace, name).await {
        Ok(Some(view)) => serde_json::from_slice::<Value>(&view.pod).unwrap_or_default(),
        Ok(None) => return text(StatusCode::NOT_FOUND, format!("pod {name:?} does not exist")),
        Err(status) => {
            return text(StatusCode::INTERNAL_SERVER_ERROR, format!("pod-sync: {}", status.message()));
        }
    };
    if pod_lookup::spec(&pod, container).is_none() {
        let message = format!("container {container:?} not found in pod {name:?}");
        return text(StatusCode::NOT_FOUND, message);
    }
    let instance = match pod_lookup::log_instance(&pod, container, query.previous) {
        Ok(instance) => instance,
        Err(error) => return text(StatusCode::BAD_REQUEST, error.to_string()),
    };
    if query.tail_lines == Some(0) && !query.follow {
        return with_type(StatusCode::OK, "text/plain", "");
    }
    match open(node, &instance, &query).await {
        Ok(chunks) => {
            let decoder = Decoder::new(query.options(now));
            answer(Log::new(chunks, decoder, query.follow, counters))
        }
        Err(why) => text(StatusCode::BAD_REQUEST, why),
    }
}

async fn open(node: &Services, instance: &Instance, query: &Query) -> Result<Streaming<LogChunk>, String> {
    let request = ReadLogRequest {
        container_id: instance.id.clone(),
        tail_lines: query.tail_lines.and_then(|n| u64::try_from(n).ok()),
        // The log of a terminated container does not grow.
        follow: query.follow && !query.previous,
    };
    let mut client = ContainerLogsClient::new(node.cri());
    client.read(request).await.map(tonic::Response::into_inner).map_err(|status| {
        record_error(&status);
        let of_file = status.message().starts_with("failed to ");
        if of_file || status.code() == tonic::Code::ResourceExhausted {
            status.message().to_owned()
        } else {
            tracing::debug!(error = status.message(), "failed to read container log");
            format!("unable to retrieve container logs for {}://{}", instance.runtime, instance.id)
        }
    })
}

fn answer(log: Log) -> Answer {
    let stream = futures::stream::unfold(log, |mut log| async move {
        log.next().await.map(|b| (Ok::<_, std::convert::Infallible>(b), log))
    });
    let mut answer = Response::new(Body::from_stream(stream));
    let kind = HeaderValue::from_static("text/plain");
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

/// A log on its way to a client.
struct Log {
    chunks: Streaming<LogChunk>,
    decoder: Decoder,
    follow: bool,
    ended: bool,
    _open: Open,
}

/// Counts an open log stream.
struct Open(prometheus_client::metrics::gauge::Gauge);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Log {
    fn new(chunks: Streaming<LogChunk>, decoder: Decoder, follow: bool, counters: &Counters) -> Self {
        counters.log_streams.inc();
        Self { chunks, decoder, follow, ended: false, _open: Open(counters.log_streams.clone()) }
    }

    /// Returns the next chunk, or none at the end. An error is appended to the text, since the status has
    /// been sent.
    async fn next(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        while out.is_empty() && !self.ended {
            match self.chunks.message().await {
                Ok(Some(chunk)) => match self.decoder.decode(&chunk.data, &mut out) {
                    Ok(Flow::More) => {}
                    Ok(Flow::Full) => self.ended = true,
                    Err(unsupported) => self.fail(&mut out, &unsupported.to_string()),
                },
                Ok(None) => {
                    self.ended = true;
                    // While the container runs, the end of an unterminated line may follow.
                    if !self.follow
                        && let Err(unsupported) = self.decoder.end(&mut out)
                    {
                        self.fail(&mut out, &unsupported.to_string());
                    }
                    if self.decoder.skipped() > 0 {
                        tracing::warn!(lines = self.decoder.skipped(), "log has lines of unknown format");
                    }
                }
                Err(status) => self.fail(&mut out, status.message()),
            }
        }
        (!out.is_empty()).then(|| out.into())
    }

    fn fail(&mut self, out: &mut Vec<u8>, why: &str) {
        self.ended = true;
        out.extend_from_slice(why.as_bytes());
        out.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str, split: bool) -> Result<Query, BadQuery> {
        Query::parse(&node_api_base::uri::decode_form(query), split)
    }

    #[test]
    fn queries_are_parsed_as_by_the_api_machinery() {
        let query =
            parse("follow=true&previous=1&timestamps=&tailLines=5&limitBytes=10&sinceSeconds=3", false);
        let want = Query {
            follow: true,
            previous: true,
            timestamps: true,
            since_seconds: Some(3),
            tail_lines: Some(5),
            limit_bytes: Some(10),
            ..Query::default()
        };
        assert_eq!(query, Ok(want));
        assert_eq!(parse("follow=False&previous=0&stream=All&tail=all", false).unwrap().tail_lines, None);
        assert_eq!(parse("tail=7&unknown=x", false).unwrap().tail_lines, Some(7));
        for (query, want) in [
            ("tailLines=x", BadQuery::Undecodable),
            ("sinceTime=yesterday", BadQuery::Undecodable),
            ("tailLines=-1", BadQuery::Invalid),
            ("limitBytes=0", BadQuery::Invalid),
            ("sinceSeconds=0", BadQuery::Invalid),
            ("sinceSeconds=5&sinceTime=2026-11-21T02:31:07Z", BadQuery::Invalid),
            ("stream=Stdout", BadQuery::Stream("Stdout".into())),
        ] {
            assert_eq!(parse(query, false), Err(want), "{query}");
        }
        assert!(parse("stream=Stderr", true).is_ok());
        assert_eq!(parse("stream=Stderr&tailLines=1", true), Err(BadQuery::Invalid));
        assert_eq!(parse("stream=Both", true), Err(BadQuery::Invalid));
    }
}
