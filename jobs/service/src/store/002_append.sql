-- Whether a job makes only the splits of files that its input has grown by.
ALTER TABLE jobs ADD COLUMN append INTEGER NOT NULL DEFAULT 0;
