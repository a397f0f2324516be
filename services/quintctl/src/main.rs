//! The `quintctl` binary.

fn main() -> std::process::ExitCode {
    quintctl::main()
}
