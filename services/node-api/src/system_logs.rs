//! `/logs/`: serves the files of a directory. Files outside of it are not served, not even through links.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use tokio::io::{AsyncReadExt as _, Take};
use tokio_util::io::ReaderStream;

use crate::answer::{Answer, error, not_found, with_type};

/// Maximum number of entries in a directory listing.
const ENTRIES: usize = 10_000;
/// Size of the read buffer.
const BLOCK: usize = 64 << 10;

/// Responds with a file or a listing of a directory below `root`.
pub async fn page(root: &Path, path: &str) -> Answer {
    let below = path.trim_start_matches("/logs");
    let Ok(path) = percent_decode_str(below).decode_utf8() else { return not_found() };
    self::below(root, &path).await
}

/// Does the same as [`page`]. `path` is what follows `/logs`, decoded.
pub async fn below(root: &Path, path: &str) -> Answer {
    let Some(wanted) = inside(root, path) else { return not_found() };
    match find(root, &wanted).await {
        Ok(real) => serve(&real, path).await.unwrap_or_else(|e| failed(e.kind())),
        Err(kind) => failed(kind),
    }
}

/// Opens a file below `root`. Returns it with its size, or none if it does not exist or must not be read.
pub async fn open(root: &Path, path: &str) -> Option<Take<tokio::fs::File>> {
    let real = find(root, &inside(root, path)?).await.ok()?;
    let meta = tokio::fs::metadata(&real).await.ok().filter(std::fs::Metadata::is_file)?;
    Some(tokio::fs::File::open(real).await.ok()?.take(meta.len()))
}

fn failed(kind: ErrorKind) -> Answer {
    match kind {
        ErrorKind::PermissionDenied => error(StatusCode::FORBIDDEN, "403 Forbidden"),
        ErrorKind::NotFound | ErrorKind::NotADirectory => not_found(),
        _ => error(StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error"),
    }
}

/// Returns the path below `root`, if it has no component `..`.
fn inside(root: &Path, below: &str) -> Option<PathBuf> {
    let below = Path::new(below.trim_start_matches('/'));
    let is_plain = below.components().all(|c| matches!(c, Component::Normal(_)));
    (is_plain && !below.as_os_str().as_encoded_bytes().contains(&0)).then(|| root.join(below))
}

/// Resolves all links. Returns the path if it is still below `root`.
async fn find(root: &Path, wanted: &Path) -> Result<PathBuf, ErrorKind> {
    let root = tokio::fs::canonicalize(root).await.map_err(|e| e.kind())?;
    let real = tokio::fs::canonicalize(wanted).await.map_err(|e| e.kind())?;
    if real.starts_with(&root) { Ok(real) } else { Err(ErrorKind::NotFound) }
}

async fn serve(real: &Path, shown: &str) -> std::io::Result<Answer> {
    let meta = tokio::fs::metadata(real).await?;
    if meta.is_dir() {
        if !shown.ends_with('/') && !shown.is_empty() {
            let mut answer = Response::new(Body::empty());
            *answer.status_mut() = StatusCode::MOVED_PERMANENTLY;
            let name = real.file_name().unwrap_or_default().to_string_lossy();
            let to = format!("{}/", utf8_percent_encode(&name, NON_ALPHANUMERIC));
            answer.headers_mut().extend(HeaderValue::from_str(&to).ok().map(|to| (header::LOCATION, to)));
            return Ok(answer);
        }
        return list(real).await;
    }
    if !meta.is_file() {
        // Opening a FIFO would block.
        return Err(ErrorKind::PermissionDenied.into());
    }
    let file = tokio::fs::File::open(real).await?;
    // The file may grow while it is read. The response has its current size.
    let file = file.take(meta.len());
    let body = Body::from_stream(ReaderStream::with_capacity(file, BLOCK));
    let mut answer = with_type(StatusCode::OK, "text/plain; charset=utf-8", body);
    answer.headers_mut().insert(header::CONTENT_LENGTH, meta.len().into());
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Ok(answer)
}

async fn list(dir: &Path) -> std::io::Result<Answer> {
    let mut names = Vec::new();
    let mut entries = tokio::fs::read_dir(dir).await?;
    while let Some(entry) = entries.next_entry().await? {
        let is_dir = entry.file_type().await.is_ok_and(|t| t.is_dir());
        names.push(format!("{}{}", entry.file_name().to_string_lossy(), if is_dir { "/" } else { "" }));
        if names.len() >= ENTRIES {
            break;
        }
    }
    names.sort();
    let mut out =
        String::from("<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n");
    for name in names {
        let link = utf8_percent_encode(&name, NON_ALPHANUMERIC).to_string().replace("%2F", "/");
        let shown = name.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        // Writing to a String does not fail.
        let _ = writeln!(out, "<a href=\"{link}\">{shown}</a>");
    }
    out.push_str("</pre>\n");
    Ok(with_type(StatusCode::OK, "text/html; charset=utf-8", out))
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    async fn get(root: &Path, path: &str) -> (StatusCode, String) {
        let answer = page(root, path).await;
        let code = answer.status();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (code, String::from_utf8_lossy(&body).into_owned())
    }

    #[tokio::test]
    async fn files_and_listings_are_served_and_nothing_outside_of_the_directory() {
        let base = tempfile::tempdir().unwrap();
        let root = base.path().join("log");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        std::fs::write(root.join("syslog"), "line\n").unwrap();
        std::fs::write(root.join("sub/<b>&"), "deep\n").unwrap();
        std::fs::write(base.path().join("secret"), "secret\n").unwrap();
        std::os::unix::fs::symlink("../secret", root.join("link")).unwrap();
        std::os::unix::fs::symlink("syslog", root.join("good-link")).unwrap();
        assert_eq!(get(&root, "/logs/syslog").await, (StatusCode::OK, "line\n".to_owned()));
        assert_eq!(get(&root, "/logs/good-link").await, (StatusCode::OK, "line\n".to_owned()));
        assert_eq!(get(&root, "/logs/sub/%3Cb%3E%26").await, (StatusCode::OK, "deep\n".to_owned()));
        let (code, list) = get(&root, "/logs/").await;
        assert!(code == StatusCode::OK && list.contains("<a href=\"sub/\">sub/</a>"), "{list}");
        assert!(get(&root, "/logs/sub/").await.1.contains("&lt;b&gt;&amp;"));
        assert_eq!(get(&root, "/logs/sub").await.0, StatusCode::MOVED_PERMANENTLY);
        for bad in ["link", "../secret", "%2e%2e/secret", "sub/../../secret", "none", "syslog/x", "a%00b"] {
            let (code, body) = get(&root, &format!("/logs/{bad}")).await;
            assert_eq!(code, StatusCode::NOT_FOUND, "{bad}: {body}");
        }
    }
}
