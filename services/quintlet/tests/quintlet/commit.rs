//! The program has the commit that it was built from.

#[path = "../../build/commit.rs"]
mod build_script;

use std::path::Path;
use std::process::Command;

use build_script::find;

/// Runs git in `dir` with a configured author. Returns its output.
fn git(dir: &Path, args: &[&str]) -> String {
    let name = ["-c", "user.name=t", "-c", "user.email=t@example.test"];
    let output = Command::new("git").arg("-C").arg(dir).args(name).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn head(dir: &Path) -> Option<String> {
    Some(git(dir, &["rev-parse", "HEAD"]))
}

#[test]
fn the_commit_is_found_in_every_kind_of_checkout() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    std::fs::create_dir(&repo).unwrap();
    assert_eq!(find(&repo).commit, None, "a source archive");
    git(&repo, &["init", "-q", "-b", "main"]);
    assert_eq!(find(&repo).commit, None, "no commit yet");
    git(&repo, &["commit", "-q", "--allow-empty", "-m", "one"]);
    assert_eq!(find(&repo).commit, head(&repo));
    assert!(find(&repo).depends_on.iter().any(|p| p.ends_with("refs/heads/main")), "{:?}", find(&repo));
    git(&repo, &["pack-refs", "--all"]);
    assert_eq!(find(&repo).commit, head(&repo), "packed refs");
    assert!(find(&repo).depends_on.iter().all(|p| p.exists()), "{:?}", find(&repo));
    let linked = dir.path().join("linked");
    git(&repo, &["worktree", "add", "-q", "-b", "topic/two", linked.to_str().unwrap()]);
    git(&linked, &["commit", "-q", "--allow-empty", "-m", "two"]);
    assert_eq!(find(&linked).commit, head(&linked), "a linked work tree");
    assert_ne!(find(&linked).commit, find(&repo).commit);
    git(&linked, &["checkout", "-q", "--detach"]);
    assert_eq!(find(&linked).commit, head(&linked), "a detached HEAD");
    let inner = repo.join("unpacked");
    std::fs::create_dir(&inner).unwrap();
    assert_eq!(find(&inner).commit, None, "an archive unpacked within another repository");
}

#[test]
fn quintctl_version_prints_the_commit_of_this_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let given = std::env::var("QUINTLET_COMMIT").ok().filter(|commit| !commit.is_empty());
    let want = given.or(find(root).commit).unwrap_or_else(|| "unknown".to_owned());
    let run = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_quintlet"))
        .args(["quintctl", "--run-dir", run.path().to_str().unwrap(), "-o", "json", "version"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let output_text = String::from_utf8(output.stdout).unwrap();
    assert!(output_text.contains(&format!("\"commit\": \"{want}\"")), "{want} is not in {output_text}");
}
