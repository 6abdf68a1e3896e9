//! The web page at `/`: a few files without a build step, embedded in the program.

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::App;
use super::problem::ProblemDetails;

macro_rules! files {
    ($($name:literal),* $(,)?) => { [$(($name, include_str!(concat!("../page/", $name)))),*] };
}

const FILES: [(&str, &str); 16] = files!(
    "index.html",
    "style.css",
    "api.js",
    "dom.js",
    "eventlist.js",
    "executors.js",
    "format.js",
    "job.js",
    "list.js",
    "log.js",
    "main.js",
    "picture.js",
    "plot.js",
    "result.js",
    "stream.js",
    "submit.js",
);

pub fn router() -> Router<App> {
    Router::new()
        .route("/", get(|| async { file("index.html") }))
        .route("/page/{name}", get(|Path(name): Path<String>| async move { file(&name) }))
}

fn file(name: &str) -> Response {
    let Some((name, text)) = FILES.iter().find(|(n, _)| *n == name) else {
        return ProblemDetails::new(StatusCode::NOT_FOUND, "there is no such file").into_response();
    };
    let media_type = match name.rsplit_once('.') {
        Some((_, "html")) => "text/html; charset=utf-8",
        Some((_, "css")) => "text/css; charset=utf-8",
        _ => "text/javascript; charset=utf-8",
    };
    ([(header::CONTENT_TYPE, HeaderValue::from_static(media_type))], *text).into_response()
}
