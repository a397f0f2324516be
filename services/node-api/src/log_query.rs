//! `/logs/?query=`: queries the journal of services, or their files in the log directory
//! (`enableSystemLogQuery`).
//!
//! This process can read the journal as a member of the group `systemd-journal`, and files according to their
//! modes.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt as _};
use http::StatusCode;
use node_api_base::answer::{Answer, error, with_type};
use quintlet_kit::task;
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;
use tokio_util::io::ReaderStream;

use crate::system_logs;

/// Maximum number of services in one query.
const MAX_SERVICES: usize = 4;
/// Maximum length of a service's name, in bytes.
const MAX_NAME_LENGTH: usize = 256;
/// Maximum of `tailLines`.
const MAX_TAIL_LINES: i64 = 100_000;
/// Time limit for the output of a query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for checking whether the journal has a service.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent queries. Each runs a process.
const MAX_CONCURRENT: usize = 8;

/// Runs queries.
#[derive(Debug)]
pub(crate) struct LogQuery {
    journalctl: PathBuf,
    permits: Arc<Semaphore>,
}

impl Default for LogQuery {
    fn default() -> Self {
        Self { journalctl: PathBuf::from("journalctl"), permits: Arc::new(Semaphore::new(MAX_CONCURRENT)) }
    }
}

/// The parameters of a query.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Query {
    files: Vec<String>,
    services: Vec<String>,
    options: Options,
}

/// The parameters that select lines of the journal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Options {
    since: Option<jiff::Timestamp>,
    until: Option<jiff::Timestamp>,
    tail: Option<i64>,
    boot: Option<i64>,
    pattern: Option<String>,
}

/// A query that is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum QueryError {
    /// The query has neither a file nor a service.
    #[error("query: names nothing")]
    Empty,
    /// A time cannot be parsed.
    #[error("{name}: {value:?} is no time of RFC 3339")]
    Time {
        /// Name of the option.
        name: &'static str,
        /// The value in the query.
        value: String,
    },
    /// A number cannot be parsed.
    #[error("{name}: {value:?} is no number")]
    Number {
        /// Name of the option.
        name: &'static str,
        /// The value in the query.
        value: String,
    },
    /// The query names a file in the log directory and a service of the journal.
    #[error("query: a file and a service at a time")]
    FileAndService,
    /// Only one file is read at a time.
    #[error("query: more than one file")]
    SeveralFiles,
    /// Options such as `sinceTime` apply to the journal only.
    #[error("query: a file has no options")]
    FileWithOptions,
    /// The query names more services than one call of journalctl gets.
    #[error("query: more than {MAX_SERVICES} services")]
    TooManyServices,
    /// The name has characters that systemd does not allow in one.
    #[error("query: {0:?} is no name of a service")]
    ServiceName(String),
    /// No entry can match.
    #[error("untilTime: before sinceTime")]
    UntilBeforeSince,
    /// Boots are numbered from 0, the current one, downwards.
    #[error("boot: must be less than 1")]
    Boot,
    /// The number of lines is negative or above the limit.
    #[error("tailLines: must be between 0 and {MAX_TAIL_LINES}")]
    TailLines,
    /// The pattern is rejected by the parser, before journalctl gets it.
    #[error("pattern: {0:?} is no regular expression")]
    Pattern(String),
}

impl QueryError {
    /// Returns 400 for a query that cannot be parsed, and 406 for one that is not valid, as in the kubelet.
    fn status(&self) -> StatusCode {
        match self {
            Self::Empty | Self::Time { .. } | Self::Number { .. } => StatusCode::BAD_REQUEST,
            Self::FileAndService
            | Self::SeveralFiles
            | Self::FileWithOptions
            | Self::TooManyServices
            | Self::ServiceName(_)
            | Self::UntilBeforeSince
            | Self::Boot
            | Self::TailLines
            | Self::Pattern(_) => StatusCode::NOT_ACCEPTABLE,
        }
    }
}

impl Query {
    /// Returns none if the request is not a query.
    fn parse(pairs: &[(String, String)]) -> Result<Option<Self>, QueryError> {
        if !pairs.iter().any(|(k, _)| k == "query") {
            return Ok(None);
        }
        let queries =
            pairs.iter().filter(|(k, v)| k == "query" && !v.trim().is_empty()).map(|(_, v)| v.clone());
        let (files, services): (Vec<_>, Vec<_>) = queries.partition(|q| q.contains(['/', '\\']));
        if files.is_empty() && services.is_empty() {
            return Err(QueryError::Empty);
        }
        let get =
            |name: &str| pairs.iter().find(|(k, v)| k == name && !v.is_empty()).map(|(_, v)| v.as_str());
        let time = |name| {
            let read = |v: &str| v.parse().map_err(|_| QueryError::Time { name, value: v.to_owned() });
            get(name).map(read).transpose()
        };
        let number = |name| {
            let read = |v: &str| v.parse().map_err(|_| QueryError::Number { name, value: v.to_owned() });
            get(name).map(read).transpose()
        };
        let options = Options {
            since: time("sinceTime")?,
            until: time("untilTime")?,
            tail: number("tailLines")?,
            boot: number("boot")?,
            pattern: get("pattern").map(str::to_owned),
        };
        let query = Self { files, services, options };
        query.check()?;
        Ok(Some(query))
    }

    fn check(&self) -> Result<(), QueryError> {
        let Options { since, until, tail, boot, pattern } = &self.options;
        if !self.files.is_empty() {
            if !self.services.is_empty() {
                return Err(QueryError::FileAndService);
            }
            if self.files.len() > 1 {
                return Err(QueryError::SeveralFiles);
            }
            if self.options != Options::default() {
                return Err(QueryError::FileWithOptions);
            }
        }
        if self.services.len() > MAX_SERVICES {
            return Err(QueryError::TooManyServices);
        }
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.:@".contains(c);
        let is_valid = |service: &&String| service.len() <= MAX_NAME_LENGTH && service.chars().all(is_name);
        if let Some(invalid) = self.services.iter().find(|service| !is_valid(service)) {
            return Err(QueryError::ServiceName(invalid.clone()));
        }
        if since.zip(*until).is_some_and(|(since, until)| since > until) {
            return Err(QueryError::UntilBeforeSince);
        }
        if boot.is_some_and(|b| b > 0) {
            return Err(QueryError::Boot);
        }
        if tail.is_some_and(|n| !(0..=MAX_TAIL_LINES).contains(&n)) {
            return Err(QueryError::TailLines);
        }
        if let Some(pattern) = pattern {
            regex::Regex::new(pattern).map_err(|_| QueryError::Pattern(pattern.clone()))?;
        }
        Ok(())
    }

    /// Returns the arguments of journalctl.
    fn arguments(&self, services: &[String]) -> Vec<String> {
        let Options { since, until, tail, boot, pattern } = &self.options;
        let day = |t: &jiff::Timestamp| t.strftime("%Y-%m-%d %H:%M:%S").to_string();
        let mut all: Vec<String> = ["--utc", "--no-pager", "--output=short-precise"].map(Into::into).into();
        all.extend(since.as_ref().map(|t| format!("--since={}", day(t))));
        all.extend(until.as_ref().map(|t| format!("--until={}", day(t))));
        all.extend(tail.map(|n| format!("--lines={n}")));
        all.extend(boot.map(|n| format!("--boot={n}")));
        all.extend(services.iter().map(|s| format!("--unit={s}")));
        if let Some(pattern) = pattern {
            all.extend([format!("--grep={pattern}"), "--case-sensitive=false".to_owned()]);
        }
        all
    }
}

/// A query of services, for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Journal {
    /// The services, in the order of the query.
    pub services: Vec<String>,
    /// Arguments of journalctl.
    pub arguments: Vec<String>,
}

/// Parses a query for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn journal_of(pairs: &[(String, String)]) -> Result<Option<Journal>, QueryError> {
    let Some(query) = Query::parse(pairs)?.filter(|query| query.files.is_empty()) else { return Ok(None) };
    let arguments = query.arguments(&query.services);
    Ok(Some(Journal { services: query.services, arguments }))
}

type Part = BoxStream<'static, std::io::Result<Bytes>>;

impl LogQuery {
    /// Responds to a query. Returns none if the request is not a query.
    pub(crate) async fn page(&self, root: &Path, pairs: &[(String, String)]) -> Option<Answer> {
        let query = match Query::parse(pairs) {
            Ok(query) => query?,
            Err(refusal) => return Some(error(refusal.status(), refusal)),
        };
        if let Some(file) = query.files.first() {
            return Some(system_logs::below(root, &file.replace('\\', "/")).await);
        }
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            return Some(error(StatusCode::TOO_MANY_REQUESTS, "too many log queries"));
        };
        let parts = self.parts(root, &query).await;
        let all =
            stream::iter(parts).flatten().take_until(tokio::time::sleep(QUERY_TIMEOUT)).map(move |block| {
                let _held = &permit;
                block
            });
        Some(with_type(StatusCode::OK, "text/plain; charset=utf-8", Body::from_stream(all)))
    }

    /// Returns the logs of services: files first, then the journal.
    async fn parts(&self, root: &Path, query: &Query) -> Vec<Part> {
        let (mut journal, mut files) = (Vec::new(), Vec::new());
        for service in &query.services {
            if self.has_lines_of(service).await { journal.push(service.clone()) } else { files.push(service) }
        }
        let mut parts = Vec::new();
        if !files.is_empty() && query.options != Options::default() {
            return vec![text_part(format!(
                "options are for the journal, which does not have {files:?}: try without them\n"
            ))];
        }
        for service in files {
            parts.push(match file_of(root, service).await {
                Some(file) => ReaderStream::new(file).boxed(),
                None => text_part(format!("log not found for {service}\n")),
            });
        }
        if !journal.is_empty() {
            parts.push(self.journal(&query.arguments(&journal)).await);
        }
        parts
    }

    /// Starts journalctl. The process is killed when the result is dropped.
    async fn spawn(&self, arguments: &[String]) -> std::io::Result<Child> {
        let mut command = Command::new(&self.journalctl);
        command
            .args(arguments)
            .env("LC_ALL", "C.UTF-8")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        task::blocking(move || command.spawn()).await
    }

    /// Returns whether the journal has a line of the service.
    async fn has_lines_of(&self, service: &str) -> bool {
        let arguments = ["--quiet", "--no-pager", "--lines=1", "--output=cat"].map(str::to_owned);
        let arguments = [&arguments[..], &[format!("--unit={service}")]].concat();
        let lookup = async { self.spawn(&arguments).await?.wait_with_output().await };
        let output = tokio::time::timeout(LOOKUP_TIMEOUT, lookup).await;
        matches!(output, Ok(Ok(output)) if !output.stdout.is_empty())
    }

    /// Returns the output of journalctl.
    async fn journal(&self, arguments: &[String]) -> Part {
        let unavailable = || text_part("error: journal output not available\n".to_owned());
        let Ok(mut child) = self.spawn(arguments).await else { return unavailable() };
        let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) else { return unavailable() };
        // The process ends when its output is no longer read.
        let held = move |block| {
            let _held = &child;
            block
        };
        // Both are read at once, since a process that fills a pipe without a reader would never end.
        stream::select(ReaderStream::new(out), ReaderStream::new(err)).map(held).boxed()
    }
}

fn text_part(text: String) -> Part {
    stream::once(async move { Ok(Bytes::from(text)) }).boxed()
}

/// Returns the log file of a service, by the usual names.
async fn file_of(root: &Path, service: &str) -> Option<tokio::io::Take<tokio::fs::File>> {
    for name in [service.to_owned(), format!("{service}.log"), format!("{service}/{service}.log")] {
        if let Some(file) = system_logs::open(root, &name).await {
            return Some(file);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use http_body_util::BodyExt as _;

    use super::*;
    use node_api_base::uri::decode_form;

    /// Writes a fake journalctl that knows `known.service` and prints its arguments.
    fn query(dir: &Path) -> LogQuery {
        let path = dir.join("journalctl");
        let script = "#!/bin/sh\ncase \"$*\" in\n*--quiet*--unit=known*|*--quiet*--unit=noisy*) echo line;;\n*--quiet*) ;;\n*--unit=noisy*) head -c 200000 /dev/zero | tr '\\0' e >&2; echo end;;\n*) echo \"asked: $*\";;\nesac\n";
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        LogQuery { journalctl: path, ..LogQuery::default() }
    }

    async fn ask(journal: &LogQuery, root: &Path, form: &str) -> (StatusCode, String) {
        let answer = journal.page(root, &decode_form(form)).await.expect("a query");
        let code = answer.status();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (code, String::from_utf8_lossy(&body).into_owned())
    }

    #[tokio::test]
    async fn a_query_returns_files_or_the_journal_of_services() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("log");
        std::fs::create_dir_all(root.join("deep")).unwrap();
        std::fs::write(root.join("plain.log"), "plain\n").unwrap();
        std::fs::write(root.join("deep/deep.log"), "deep\n").unwrap();
        std::fs::write(dir.path().join("secret.log"), "secret\n").unwrap();
        std::os::unix::fs::symlink("../secret.log", root.join("link.log")).unwrap();
        let journal = query(dir.path());
        let ok = |text: &str| (StatusCode::OK, text.to_owned());
        assert_eq!(ask(&journal, &root, "query=plain&query=deep").await, ok("plain\ndeep\n"));
        assert_eq!(ask(&journal, &root, "query=link").await, ok("log not found for link\n"));
        assert_eq!(ask(&journal, &root, "query=/deep/deep.log").await, ok("deep\n"));
        assert_eq!(ask(&journal, &root, "query=%5Cdeep%5Cdeep.log").await, ok("deep\n"));
        assert_eq!(ask(&journal, &root, "query=../secret.log").await.0, StatusCode::NOT_FOUND);
        assert_eq!(
            ask(&journal, &root, "query=known.service&tailLines=5&boot=-1&pattern=a.*b&sinceTime=2026-11-21T02:03:04Z&untilTime=2026-11-21T05:00:00%2B02:00").await,
            ok("asked: --utc --no-pager --output=short-precise --since=2026-11-21 02:03:04 --until=2026-11-21 03:00:00 \
                --lines=5 --boot=-1 --unit=known.service --grep=a.*b --case-sensitive=false\n")
        );
        let (code, both) = ask(&journal, &root, "query=known&query=plain").await;
        assert_eq!((code, both.starts_with("plain\nasked: ")), (StatusCode::OK, true), "{both}");
        let noisy = tokio::time::timeout(QUERY_TIMEOUT / 2, ask(&journal, &root, "query=noisy")).await;
        let (_, both) = noisy.expect("more errors than a pipe holds do not stop the journal");
        assert_eq!((both.len(), both.contains("end\n")), (200_004, true));
        let (code, text) = ask(&journal, &root, "query=plain&tailLines=5").await;
        assert!(code == StatusCode::OK && text.contains("options are for the journal"), "{text}");
        assert!(
            journal.page(&root, &decode_form("tailLines=5")).await.is_none(),
            "without a query it is none"
        );
        assert_eq!(journal.permits.available_permits(), MAX_CONCURRENT, "permits are returned");
        let none = LogQuery { journalctl: dir.path().join("missing"), ..LogQuery::default() };
        assert_eq!(ask(&none, &root, "query=plain").await, ok("plain\n"));
    }

    #[tokio::test]
    async fn an_invalid_query_is_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let journal = query(dir.path());
        for (form, code) in [
            ("query=", 400),
            ("query=%20", 400),
            ("query=a&tailLines=x", 400),
            ("query=a&boot=x", 400),
            ("query=a&sinceTime=yesterday", 400),
            ("query=a&tailLines=-1", 406),
            ("query=a&tailLines=100001", 406),
            ("query=a&boot=1", 406),
            ("query=a&pattern=(", 406),
            ("query=a&sinceTime=2026-11-21T02:03:04Z&untilTime=2026-11-21T02:03:03Z", 406),
            ("query=a&query=b&query=c&query=d&query=e", 406),
            ("query=a%20b", 406),
            ("query=a;b", 406),
            ("query=*", 406),
            ("query=a&query=/b", 406),
            ("query=/a&query=/b", 406),
            ("query=/a&tailLines=1", 406),
        ] {
            let (got, text) = ask(&journal, dir.path(), form).await;
            assert_eq!(got.as_u16(), code, "{form}: {text}");
        }
        let long = format!("query={}", "a".repeat(MAX_NAME_LENGTH + 1));
        assert_eq!(ask(&journal, dir.path(), &long).await.0, StatusCode::NOT_ACCEPTABLE);
    }
}
