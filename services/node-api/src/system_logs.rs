//! `/logs/`: serves the files of a directory. Files outside of it are not served, not even through links.
//!
//! Links within the directory are resolved first, such as those of `containers` to `pods`. The result is
//! opened beneath the directory and through no link, so that a link that is planted in between leads nowhere.
//! A FIFO or a device is refused without waiting for its other end.

use std::fmt::Write as _;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use nix::errno::Errno;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use quintlet_kit::beneath::Dir;
use quintlet_kit::task;
use tokio::io::{AsyncReadExt as _, Take};
use tokio_util::io::ReaderStream;

use node_api_base::answer::{self, Answer, not_found, with_type};

/// Maximum number of entries in a directory listing.
const ENTRIES: usize = 10_000;
/// Size of the read buffer.
const BLOCK: usize = 64 << 10;

/// Responds with a file or a listing of a directory below `root`.
pub(crate) async fn page(root: &Path, path: &str) -> Answer {
    let below = path.strip_prefix("/logs").unwrap_or(path);
    let Ok(path) = percent_decode_str(below).decode_utf8() else { return not_found() };
    self::below(root, &path).await
}

/// Does the same as [`page`]. `path` is what follows `/logs`, decoded.
pub(crate) async fn below(root: &Path, path: &str) -> Answer {
    let (root, shown) = (root.to_owned(), path.to_owned());
    let found = task::blocking(move || Place::find(&root, &shown)?.open(&shown)).await;
    found.map_or_else(|error| failed(&error), Opened::into_answer)
}

/// Opens a file below `root`. Returns it with its size, or none if it does not exist or must not be read.
pub(crate) async fn open(root: &Path, path: &str) -> Option<Take<tokio::fs::File>> {
    let (root, shown) = (root.to_owned(), path.to_owned());
    match task::blocking(move || Place::find(&root, &shown)?.open(&shown)).await.ok()? {
        Opened::File(file, size) => Some(tokio::fs::File::from_std(file).take(size)),
        Opened::Listing(_) | Opened::Moved(_) => None,
    }
}

fn failed(error: &std::io::Error) -> Answer {
    match error.kind() {
        // A link in the place of what was found.
        _ if error.raw_os_error() == Some(Errno::ELOOP as i32) => not_found(),
        ErrorKind::PermissionDenied => answer::error(StatusCode::FORBIDDEN, "403 Forbidden"),
        ErrorKind::NotFound | ErrorKind::NotADirectory => not_found(),
        _ => answer::error(StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error"),
    }
}

/// Returns the path below `root`, if it has no component `..`.
fn inside(root: &Path, below: &str) -> Option<PathBuf> {
    let below = Path::new(below.trim_start_matches('/'));
    let is_plain = below.components().all(|c| matches!(c, Component::Normal(_)));
    (is_plain && !below.as_os_str().as_encoded_bytes().contains(&0)).then(|| root.join(below))
}

/// An existing file or directory below the root, as a path without links.
struct Place {
    root: Dir,
    path: PathBuf,
}

/// The content of a response.
#[derive(Debug)]
enum Opened {
    /// A file and its size. The file may grow while it is read.
    File(File, u64),
    /// A page with the entries of a directory.
    Listing(String),
    /// The path with a slash at its end.
    Moved(String),
}

impl Place {
    /// Resolves all links. Fails if the path is not below `root` then.
    fn find(root: &Path, shown: &str) -> std::io::Result<Self> {
        let wanted = inside(root, shown).ok_or(ErrorKind::NotFound)?;
        let (root, real) = (root.canonicalize()?, wanted.canonicalize()?);
        let path = real.strip_prefix(&root).map_err(|_| ErrorKind::NotFound)?.to_owned();
        Ok(Self { root: Dir::open(&root)?, path })
    }

    /// Opens the file or lists the directory. `shown` is the path of the request.
    fn open(&self, shown: &str) -> std::io::Result<Opened> {
        match self.root.dir(&self.path) {
            Ok(_) if !shown.ends_with('/') && !shown.is_empty() => {
                let name = self.path.file_name().unwrap_or_default().to_string_lossy();
                Ok(Opened::Moved(format!("{}/", utf8_percent_encode(&name, NON_ALPHANUMERIC))))
            }
            Ok(dir) => Ok(Opened::Listing(listing(&dir)?)),
            Err(error) if error.kind() == ErrorKind::NotADirectory => {
                let file = self.root.read(&self.path).map_err(|error| match error.kind() {
                    // A FIFO or a device.
                    ErrorKind::InvalidInput => ErrorKind::PermissionDenied.into(),
                    _ => error,
                })?;
                let size = file.metadata()?.len();
                Ok(Opened::File(file, size))
            }
            Err(error) => Err(error),
        }
    }
}

impl Opened {
    fn into_answer(self) -> Answer {
        match self {
            Self::File(file, size) => {
                let file = tokio::fs::File::from_std(file).take(size);
                let body = Body::from_stream(ReaderStream::with_capacity(file, BLOCK));
                let mut answer = with_type(StatusCode::OK, "text/plain; charset=utf-8", body);
                answer.headers_mut().insert(header::CONTENT_LENGTH, size.into());
                answer
                    .headers_mut()
                    .insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
                answer
            }
            Self::Listing(page) => with_type(StatusCode::OK, "text/html; charset=utf-8", page),
            Self::Moved(location) => {
                let mut answer = Response::new(Body::empty());
                *answer.status_mut() = StatusCode::MOVED_PERMANENTLY;
                answer.headers_mut().extend(
                    HeaderValue::from_str(&location).ok().map(|location| (header::LOCATION, location)),
                );
                answer
            }
        }
    }
}

fn listing(dir: &Dir) -> std::io::Result<String> {
    let mut names: Vec<String> = dir
        .first_names(ENTRIES)?
        .into_iter()
        .map(|name| {
            let is_dir = dir.dir(Path::new(&name)).is_ok();
            format!("{}{}", name.to_string_lossy(), if is_dir { "/" } else { "" })
        })
        .collect();
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
    Ok(out)
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
        std::fs::create_dir(root.join("logs")).unwrap();
        std::fs::write(root.join("logs/own"), "own\n").unwrap();
        assert_eq!(get(&root, "/logs/logs/own").await, (StatusCode::OK, "own\n".to_owned()));
        std::os::unix::fs::symlink(root.join("sub"), root.join("absolute")).unwrap();
        assert_eq!(
            get(&root, "/logs/absolute/%3Cb%3E%26").await.0,
            StatusCode::OK,
            "as of containers to pods"
        );
        nix::unistd::mkfifo(&root.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(get(&root, "/logs/fifo").await, (StatusCode::FORBIDDEN, "403 Forbidden\n".to_owned()));
        for bad in ["link", "../secret", "%2e%2e/secret", "sub/../../secret", "none", "syslog/x", "a%00b"] {
            let (code, body) = get(&root, &format!("/logs/{bad}")).await;
            assert_eq!(code, StatusCode::NOT_FOUND, "{bad}: {body}");
        }
    }
    /// Finds `sub/log`, replaces it, and opens what was found.
    fn open_after(replace: impl FnOnce(&Path)) -> std::io::Result<Opened> {
        let base = tempfile::tempdir().unwrap();
        let root = base.path().join("log");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        std::fs::create_dir(base.path().join("outside")).unwrap();
        for file in ["log/sub/log", "outside/log"] {
            std::fs::write(base.path().join(file), file).unwrap();
        }
        let place = Place::find(&root, "/sub/log").unwrap();
        replace(base.path());
        place.open("/sub/log")
    }

    #[test]
    fn a_link_or_fifo_that_takes_the_place_of_a_file_is_not_opened() {
        use std::os::unix::fs::symlink;
        assert!(matches!(open_after(|_| ()), Ok(Opened::File(_, 11))));
        let link = open_after(|base| {
            std::fs::remove_file(base.join("log/sub/log")).unwrap();
            symlink(base.join("outside/log"), base.join("log/sub/log")).unwrap();
        });
        assert_eq!(failed(&link.unwrap_err()).status(), StatusCode::NOT_FOUND);
        let dir = open_after(|base| {
            std::fs::rename(base.join("log/sub"), base.join("log/moved")).unwrap();
            symlink(base.join("outside"), base.join("log/sub")).unwrap();
        });
        assert_eq!(failed(&dir.unwrap_err()).status(), StatusCode::NOT_FOUND);
        let fifo = open_after(|base| {
            std::fs::remove_file(base.join("log/sub/log")).unwrap();
            nix::unistd::mkfifo(&base.join("log/sub/log"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        });
        assert_eq!(failed(&fifo.unwrap_err()).status(), StatusCode::FORBIDDEN);
    }
}
